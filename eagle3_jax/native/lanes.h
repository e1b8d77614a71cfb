// Vectors of this machine, by what the compiler says of it.

#ifndef EAGLE3_JAX_LANES_H_
#define EAGLE3_JAX_LANES_H_

#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <int lanes>
struct Vector {
  typedef float Floats __attribute__((vector_size(lanes * 4), aligned(4), may_alias));
  typedef int32_t Ints __attribute__((vector_size(lanes * 4)));
};

template <int lanes>
inline typename Vector<lanes>::Floats load(const float* at) {
  return *reinterpret_cast<const typename Vector<lanes>::Floats*>(at);
}
template <int lanes>
inline void store(float* at, typename Vector<lanes>::Floats value) {
  *reinterpret_cast<typename Vector<lanes>::Floats*>(at) = value;
}
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace

#endif
