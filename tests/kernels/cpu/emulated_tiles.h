// The tile instructions of AMX that kernels/cpu/amx.h uses, emulated with AVX-512 as Intel's manual defines them. The
// compiler includes this file before kernel.cpp (emulated_amx.py). What the processor would refuse ends the process.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_BF16__ 1  // amx.h then multiplies in tiles

namespace {
namespace emulated_tiles {

struct Tile {
  int rows, row_bytes;
  alignas(64) uint8_t data[16][64];
};
struct Registers {
  bool configured = false;
  Tile tiles[8];
};
inline thread_local Registers registers;

inline void require(bool valid, const char* instruction) {
  if (valid) return;
  std::fprintf(stderr, "emulated tiles: %s is not allowed here\n", instruction);
  std::abort();
}
inline Tile& tile(int i, const char* instruction) {
  require(registers.configured && i >= 0 && i < 8 && registers.tiles[i].rows, instruction);
  return registers.tiles[i];
}

inline void load_configuration(const void* from) {
  const uint8_t* bytes = (const uint8_t*)from;
  bool valid = bytes[0] == 1;
  for (int i = 1; i < 64; i++)  // the reserved bytes, and those of tiles 8 to 15
    if (i < 16 || (i >= 32 && i < 48) || i >= 56) valid &= bytes[i] == 0;
  registers = {};
  for (int i = 0; i < 8; i++) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    Tile& x = registers.tiles[i];
    x.rows = bytes[48 + i];
    x.row_bytes = row_bytes;
    valid &= x.rows <= 16 && x.row_bytes <= 64 && (x.rows == 0) == (x.row_bytes == 0);
  }
  require(valid, "ldtilecfg");
  registers.configured = true;
}
inline void release() { registers = {}; }

inline void zero(int i) {
  Tile& x = tile(i, "tilezero");
  std::memset(x.data, 0, sizeof x.data);
}
inline void load(int i, const void* from, int64_t stride) {
  Tile& x = tile(i, "tileloadd");
  std::memset(x.data, 0, sizeof x.data);
  for (int r = 0; r < x.rows; r++) std::memcpy(x.data[r], (const uint8_t*)from + r * stride, x.row_bytes);
}
inline void store(int i, void* to, int64_t stride) {
  const Tile& x = tile(i, "tilestored");
  for (int r = 0; r < x.rows; r++) std::memcpy((uint8_t*)to + r * stride, x.data[r], x.row_bytes);
}

typedef float Numbers __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

// Numbers below 2^-126 become zero, with their sign
inline Numbers flush(Numbers x) {
  const Bits bits = (Bits)x, normal = (Bits)((bits & 0x7f800000) != 0);
  return (Numbers)(bits & (normal | 0x80000000));
}
inline Numbers fused(Numbers x, Numbers y, Numbers z) { return (Numbers)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z); }
// Each pair's first or second bfloat16 number
inline Numbers first(Bits pairs) { return flush((Numbers)(pairs << 16)); }
inline Numbers second(Bits pairs) { return flush((Numbers)(pairs & 0xffff0000)); }

// C += A B. The first and the second numbers of pairs are summed apart, from 0 on, and their sums are added to C last
inline void multiply_pairs(int c, int a, int b) {
  const char* name = "tdpbf16ps";
  Tile& C = tile(c, name);
  const Tile &A = tile(a, name), &B = tile(b, name);
  require(c != a && c != b && a != b, name);
  require(A.rows == C.rows && B.row_bytes == C.row_bytes && A.row_bytes == 4 * B.rows, name);
  Numbers B_first[16], B_second[16];
  for (int k = 0; k < B.rows; k++) {
    Bits pairs;
    std::memcpy(&pairs, B.data[k], 64);
    B_first[k] = first(pairs);
    B_second[k] = second(pairs);
  }
  for (int m = 0; m < C.rows; m++) {
    Numbers sum_first = {}, sum_second = {}, to = {};
    for (int k = 0; k < B.rows; k++) {
      uint32_t pair;
      std::memcpy(&pair, A.data[m] + 4 * k, 4);
      sum_first = flush(fused(first(pair + Bits{}), B_first[k], sum_first));
      sum_second = flush(fused(second(pair + Bits{}), B_second[k], sum_second));
    }
    std::memcpy(&to, C.data[m], C.row_bytes);
    to = flush(flush(to) + flush(sum_first + sum_second));
    std::memcpy(C.data[m], &to, C.row_bytes);
  }
}

}  // namespace emulated_tiles
}  // namespace

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_tiles::load_configuration
#define _tile_release emulated_tiles::release
#define _tile_zero emulated_tiles::zero
#define _tile_loadd emulated_tiles::load
#define _tile_stored emulated_tiles::store
#define _tile_dpbf16ps emulated_tiles::multiply_pairs
