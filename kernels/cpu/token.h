// One token of every sequence, in the state's memory: the loop over rows and heads.
#pragma once
#include "schedule.h"

namespace linrope {

// The positions (b, 1) of the sequences at the slots of a pool (rows, 1). Checks that the slots are different rows
inline Tensor positions_at(const Tensor& slots, const Tensor& pool, int64_t b, int64_t rows) {
  check_shape("slots", slots, {b}), check_type("slots", slots, ScalarType::Long, "int64");
  check_contiguous("slots", slots);
  check_shape("positions", pool, {rows, 1}), check_type("positions", pool, ScalarType::Long, "int64");
  check_contiguous("positions", pool);
  const int64_t *from = (const int64_t*)pool.data_ptr(), *slot = (const int64_t*)slots.data_ptr();
  const Tensor result = empty(ScalarType::Long, {b, 1});
  std::vector<bool> taken(rows);
  for (int64_t i = 0; i < b; i++) {
    STD_TORCH_CHECK(slot[i] >= 0 && slot[i] < rows && !taken[slot[i]], "slots: got ", slot[i],
                    slot[i] >= 0 && slot[i] < rows ? " twice" : "", ", expected different rows 0 .. ", rows - 1);
    taken[slot[i]] = true, ((int64_t*)result.data_ptr())[i] = from[slot[i]];
  }
  return result;
}

// The positions that a step advances, within the range in which angles are exact
inline int64_t* advancing_positions(const Call& c, const Maybe& positions) {
  STD_TORCH_CHECK(positions, "positions: got none, expected those that advance");
  check_shape("positions", *positions, {c.sequences, 1}), check_contiguous("positions", *positions);
  check_type("positions", *positions, ScalarType::Long, "int64");
  int64_t* position = (int64_t*)positions->data_ptr();
  for (int64_t i = 0; i < c.sequences; i++)
    STD_TORCH_CHECK(position[i] >= 0 && position[i] < int64_t(1) << 31, "positions: got ", position[i],
                    ", expected 0 .. 2^31 - 1");
  return position;
}

// Writes c.out and the rows of kv and z; then advances the positions, if given
inline void run_step(const Call& c, const Tensor& kv, const Tensor& z, int64_t* position) {
  const Schedule schedule(c);
  float* to_kv = (float*)kv.data_ptr();
  double* to_z = (double*)z.data_ptr();
  const int64_t heads = schedule.heads();
  const bool small = heads * schedule.state_size < kMinParallelStep;
  const int64_t bundle = small ? c.g : 1, bundles = c.g ? c.g / bundle : 0;
  const auto step_range = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t row = i / bundles, head = i % bundles * bundle, at = schedule.row(row * c.g);
      isa().step(c, row, head, head + bundle, to_kv + at * schedule.state_size, to_z + at * schedule.z_size);
    }
  };
  if (small) step_range(0, c.sequences * bundles);
  else torch::stable::parallel_for(0, c.sequences * bundles, 1, step_range);
  for (int64_t i = 0; position && i < c.sequences; i++) position[i]++;
}

}  // namespace linrope
