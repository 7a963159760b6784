// Which of the instruction sets this machine can run: what the processor has (cpuid), and whether the system keeps the
// registers when it switches threads (xgetbv). Compilers' own __builtin_cpu_supports reads a table that only GCC's library
// fills.
#pragma once
#include <vector>

#include "call.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace linrope {

#if defined(__x86_64__)
struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  explicit Registers(unsigned leaf, unsigned subleaf = 0) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

// All these bits of x are set
template <class... Bits> bool has(uint64_t x, Bits... bits) { return ((x >> bits & 1) && ...); }

// The sets of registers that the system keeps: 1 SSE, 2 AVX, 5 to 7 AVX-512, 17 and 18 AMX
static uint64_t kept_registers() {
  unsigned low, high;
  if (!has(Registers(1).ecx, 27)) return 0;  // no xgetbv
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

// Linux has a process ask for the tile registers; other systems have not been tried
static bool may_use_tiles() {
#if defined(LINROPE_EMULATED_TILES)
  return true;  // tests/kernels/cpu/emulated_tiles.h
#elif defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  const bool amx = has(Registers(7).edx, 22, 24) && has(Registers(7, 1).eax, 5);  // tiles, bfloat16 in them; AVX512_BF16
  return amx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 && has(kept_registers(), 17, 18);
#else
  return false;
#endif
}
#endif

static std::vector<const Isa*> available_sets() {  // best first
  std::vector<const Isa*> sets{&isa_baseline};
#if defined(__x86_64__)
  const uint64_t kept = kept_registers();
  // FMA, MOVBE, AVX, F16C; LZCNT; BMI1, AVX2, BMI2
  const bool v3 = has(kept, 1, 2) && has(Registers(1).ecx, 12, 22, 28, 29) && has(Registers(0x80000001).ecx, 5) &&
                  has(Registers(7).ebx, 3, 5, 8);
  const bool v4 = v3 && has(kept, 5, 6, 7) && has(Registers(7).ebx, 16, 17, 28, 30, 31);  // AVX-512 F, DQ, CD, BW, VL
  if (v3) sets.insert(sets.begin(), &isa_v3);
  if (v4) sets.insert(sets.begin(), &isa_v4);
  if (v4 && may_use_tiles()) sets.insert(sets.begin(), &isa_amx);
#endif
  return sets;
}

}  // namespace linrope
