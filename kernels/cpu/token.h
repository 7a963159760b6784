// One token of every sequence, in the state's memory: the checks of its numbers, and the loop over rows and heads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "arguments.h"
#include "schedule.h"

namespace linrope {

constexpr int64_t kMaxPosition = (int64_t(1) << 31) - 1;  // angles are exact up to it

// The numbers of a step, with the words of linrope/operation/checks.py and positions.py. A NaN passes
inline void check_log_decay(const Call& c) {
  const View& a = c.log_decay;
  if (!a.data) return;
  double most = 0;
  bool known = true;
  const auto look = [&]<class T>(const T* x) {
    for (int64_t i = 0; i < c.units; i++) {
      most = x[i * a.last] > most ? x[i * a.last] : most;
      known = known && x[i * a.last] == x[i * a.last];
    }
  };
  for (int64_t row = 0; row < c.sequences; row++)
    for (int64_t head = 0; head < c.g; head++) {
      const int64_t at = row * a.batch + head * a.head;
      a.type == kFloat32 ? look(a.as<float>() + at) : look(a.as<double>() + at);
    }
  if (!known) return;
  if (most > 0) {
    char text[32];
    snprintf(text, sizeof(text), "%.3g", most);
    refuse("log_decay: got up to ", text, ", expected numbers <= 0");
  }
}

inline void check_positions(const Tensor& positions) {
  const int64_t *x = (const int64_t*)positions.data_ptr(), count = positions.numel();
  const auto [low, high] = std::minmax_element(x, x + count);
  if (count && (*low < 0 || *high > kMaxPosition))
    refuse("positions: got ", *low, " .. ", *high, ", expected 0 .. ", kMaxPosition);
}

// The positions that a step advances, those of a state: (sequences,) or (sequences, 1)
inline int64_t* advancing_positions(int64_t sequences, const Maybe& positions) {
  if (!positions) refuse("positions: got None, expected those that advance");
  if (positions->dim() == 1) numbers<int64_t>("positions", *positions, kInt64, {sequences});
  else numbers<int64_t>("positions", *positions, kInt64, {sequences, 1});
  int64_t* position = (int64_t*)positions->data_ptr();
  bool fits = true;
  for (int64_t i = 0; i < sequences; i++) fits = fits && position[i] >= 0 && position[i] <= kMaxPosition;
  if (fits) return position;
  std::string list;
  for (int64_t i = 0; i < sequences; i++) list.append(i ? ", " : "").append(std::to_string(position[i]));
  refuse("state: got positions [", list, "] and 1 more tokens, expected 0 .. ", kMaxPosition);
}

// The positions (b, 1) of the sequences at the slots of a pool (rows, 1). Checks that the slots are different rows
inline Tensor positions_at(const Tensor& slots, const Tensor& pool, int64_t b, int64_t rows) {
  const int64_t* slot = numbers<int64_t>("slots", slots, kInt64, {b});
  const int64_t* from = numbers<int64_t>("positions", pool, kInt64, {rows, 1});
  const Tensor result = empty(kInt64, {b, 1});
  std::vector<bool> taken(rows);
  for (int64_t i = 0; i < b; i++) {
    const bool exists = slot[i] >= 0 && slot[i] < rows;
    if (!exists || taken[slot[i]])
      refuse("slots: got ", slot[i], exists ? " twice" : "", ", expected different rows 0 .. ", rows - 1);
    taken[slot[i]] = true;
    ((int64_t*)result.data_ptr())[i] = from[slot[i]];
  }
  return result;
}

// Writes c.out, and the rows of kv and z
inline void run_step(const Call& c) {
  const Schedule schedule(c);
  const bool small = schedule.heads() * schedule.state_size < kMinParallelStep;
  const int64_t bundle = small ? c.g : 1, bundles = c.g ? c.g / bundle : 0;
  for_ranges(c.sequences * bundles, !small, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t row = i / bundles, head = i % bundles * bundle, at = schedule.row(row * c.g);
      isa().step(c, row, head, head + bundle, c.kv.as<float>() + at * schedule.state_size,
                 c.z.data ? c.z.as<double>() + at * schedule.z_size : nullptr);
    }
  });
}

}  // namespace linrope
