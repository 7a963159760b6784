// Scratch memory. The code that lays pieces out runs twice: first over an arena that only counts, then over one that
// has as many bytes as were counted. So no size is written down twice.
#pragma once
#include <new>
#include <utility>

#include "vector.h"

namespace linrope {
namespace {

class Arena {  // hands out pieces aligned to 64 bytes
 public:
  explicit Arena(char* memory = nullptr) : memory(memory) {}
  // n numbers that are not set; null while the arena counts
  template <class T> T* take(size_t n) {
    T* piece = memory ? (T*)(memory + used) : nullptr;
    used += (n * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  size_t bytes() const { return used; }

 private:
  char* memory;  // null: this arena counts
  size_t used = 0;
};

// Memory of at least this many bytes. Each thread has its own, and uses it again in its next task
inline char* thread_memory(size_t bytes) {
  static thread_local struct Memory {
    char* data = nullptr;
    size_t size = 0;
    ~Memory() { release(); }
    void release() { operator delete(data, std::align_val_t(64)); }
  } memory;
  if (memory.size < bytes) {
    memory.release();
    memory = {};
    memory.data = (char*)operator new(bytes, std::align_val_t(64));
    memory.size = bytes;
  }
  return memory.data;
}

// A Layout, whose constructor takes its pieces from an arena and does not touch them, in this thread's memory
template <class Layout, class... Arguments> Layout lay_out(const Arguments&... arguments) {
  Arena counter;
  Layout(counter, arguments...);
  Arena arena(thread_memory(counter.bytes()));
  return Layout(arena, arguments...);
}

}  // namespace
}  // namespace linrope
