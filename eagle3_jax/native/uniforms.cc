// Uniform numbers from threefry2x32, as `jax.random.uniform(key, (V,), minval=smallest)` draws them: an XLA custom call for the CPU.
//
// Number i of a row is the generator's answer to (0, i) under the row's key, both words xored, its upper 23 bits as a fraction; never zero.
// Whole numbers alone, so the bits are JAX's.

#include <float.h>

#include "lanes.h"
#include "pool.h"

namespace {

using Floats = Vector<kLanes>::Floats;
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

constexpr int64_t kPiece = 8192;  // numbers of one piece of work

template <int by>
inline Words turned(Words x) {
  return (x << by) | (x >> (32 - by));
}

// Four rounds, and the key's next words behind them.
template <int r0, int r1, int r2, int r3>
inline void rounds(Words& x, Words& y, uint32_t to_x, uint32_t to_y) {
  x += y, y = turned<r0>(y) ^ x;
  x += y, y = turned<r1>(y) ^ x;
  x += y, y = turned<r2>(y) ^ x;
  x += y, y = turned<r3>(y) ^ x;
  x += to_x, y += to_y;
}

struct Uniforms {
  const uint32_t* key;  // [B, 2]
  float* out;           // [B, V]
  int64_t width;

  bool run(int64_t piece) const {
    const int64_t pieces = ceiling(width, kPiece), row = piece / pieces, first = piece % pieces * kPiece;
    const uint32_t a = key[2 * row], b = key[2 * row + 1], c = a ^ b ^ 0x1BD11BDA;
    float* const to = out + row * width;
    Words count;
    for (int i = 0; i < kLanes; ++i) count[i] = static_cast<uint32_t>(first) + i;
    for (int64_t at = first, end = least(width, first + kPiece); at < end; at += kLanes, count += kLanes) {
      Words x = Words{} + a, y = count + b;
      rounds<13, 15, 26, 6>(x, y, b, c + 1);
      rounds<17, 29, 16, 24>(x, y, c, a + 2);
      rounds<13, 15, 26, 6>(x, y, a, b + 3);
      rounds<17, 29, 16, 24>(x, y, b, c + 4);
      rounds<13, 15, 26, 6>(x, y, c, a + 5);
      const Words bits = ((x ^ y) >> 9) | 0x3F800000;
      const Floats u = (Floats)bits - 1.0f;
      put(to + at, end - at, u > 0 ? u : Floats{} + FLT_MIN);
    }
    return true;
  }
};

}  // namespace

// key uint32 [B, 2] -> float32 [B, V].
extern "C" XLA_FFI_Error* eagle3_uniforms(XLA_FFI_CallFrame* frame) {
  if (answered(frame)) return nullptr;
  if (frame->args.size != 1 || frame->rets.size != 1) return refuse(frame, "uniforms: expected keys alone");
  const XLA_FFI_Buffer &key = argument(frame, 0), &out = result(frame);
  if (out.rank != 2 || !shaped(key, XLA_FFI_DataType_U32, 2, out.dims[0], 2) || !shaped(out, XLA_FFI_DataType_F32, 2, out.dims[0], out.dims[1]))
    return refuse(frame, "uniforms: expected uint32 [B, 2], and float32 [B, V] to write");
  if (out.dims[1] > INT64_C(1) << 32) return refuse(frame, "uniforms: a row holds at most 2^32 numbers");
  const int64_t width = out.dims[1];
  return share(frame, Uniforms{data<const uint32_t>(key), data<float>(out), width}, out.dims[0] * ceiling(width, kPiece));
}
