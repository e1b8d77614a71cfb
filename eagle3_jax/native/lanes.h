// Vectors of this machine, by what the compiler says of it.

#ifndef EAGLE3_JAX_LANES_H_
#define EAGLE3_JAX_LANES_H_

#include <cstdint>

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Vectors that a processor holds at once.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
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

// The first `count` numbers of a vector, or all.
inline void put(float* to, int64_t count, Vector<kLanes>::Floats x) {
  if (count >= kLanes) return store<kLanes>(to, x);
  for (int64_t i = 0; i < count; ++i) to[i] = x[i];
}

// e^x for x <= 0, within two units in the last place; NaN stays NaN. Range reduction and polynomial: Cephes, expf.
template <int lanes>
inline typename Vector<lanes>::Floats exponential(typename Vector<lanes>::Floats x) {
  using Floats = typename Vector<lanes>::Floats;
  using Ints = typename Vector<lanes>::Ints;
  x = x < -87.0f ? Floats{} - 87.0f : x;
  const Floats shifted = x * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Ints power = ((Ints)shifted - 0x4B400000 + 127) << 23;
  return (p * r * r + r + 1.0f) * (Floats)power;
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }  // a / b, rounded up

// a * b + c, rounded once where this is a processor that can. By its own instruction: a compiler that is free to contract, or not, does so
// in one loop and not in another, and a row's bits would depend on which of them it went through.
template <int lanes>
inline typename Vector<lanes>::Floats fused(typename Vector<lanes>::Floats a, typename Vector<lanes>::Floats b,
                                            typename Vector<lanes>::Floats c) {
  using Floats [[maybe_unused]] = typename Vector<lanes>::Floats;
#if defined(__AVX512F__)
  if constexpr (lanes == 16) return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
  if constexpr (lanes == 8) return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  if constexpr (lanes == 4) return (Floats)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#endif
  return a * b + c;
}

}  // namespace

#endif
