// Work shared with the threads of XLA's own pool, and what custom calls have in common.

#ifndef EAGLE3_JAX_POOL_H_
#define EAGLE3_JAX_POOL_H_

#include <sched.h>
#include <stdlib.h>

#include <atomic>
#include <cstdint>
#include <new>

#include "xla/ffi/api/c_api.h"

namespace {

constexpr const char* kNoMemory = "out of memory";

inline XLA_FFI_Error* refuse(XLA_FFI_CallFrame* frame, const char* message,
                             XLA_FFI_Error_Code code = XLA_FFI_Error_Code_INVALID_ARGUMENT) {
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = code;
  return frame->api->XLA_FFI_Error_Create(&args);
}

inline void drop(XLA_FFI_CallFrame* frame, XLA_FFI_Error* error) {
  XLA_FFI_Error_Destroy_Args args = {};
  args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  args.error = error;
  frame->api->XLA_FFI_Error_Destroy(&args);
}

// Of the pool, the caller's own among them; 1 where it does not say.
inline int64_t threads_of(XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args ask = {};
  ask.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
  ask.ctx = frame->ctx;
  ask.num_threads = &threads;
  if (XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_NumThreads(&ask)) {
    drop(frame, error);
    return 1;
  }
  return threads;
}

// `work.run(i)`, false where memory is wanting, for every i below `pieces`. The caller takes pieces from a counter beside the threads of
// the pool, and in the end waits only for pieces that somebody has begun: no thread of the pool need ever come. Those that come late find
// nothing to do, and the last one frees the counters.
template <typename Work>
struct Job {
  Work work;
  int64_t pieces;
  std::atomic<int64_t> next{0}, done{0}, users{1};
  std::atomic<bool> failed{false};

  Job(const Work& work, int64_t pieces) : work(work), pieces(pieces) {}
  void run() {
    int64_t mine = 0;
    for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces; ++mine)
      if (!work.run(piece)) failed.store(true, std::memory_order_relaxed);
    done.fetch_add(mine, std::memory_order_release);
  }
  void leave() {
    if (users.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  static void help(void* data) {
    auto* job = static_cast<Job*>(data);
    job->run();
    job->leave();
  }
};

// No exception leaves a custom call: memory that is not there is an error like any other.
template <typename Work>
XLA_FFI_Error* share(XLA_FFI_CallFrame* frame, const Work& work, int64_t pieces) {
  auto* job = new (std::nothrow) Job<Work>(work, pieces);
  if (!job) return refuse(frame, kNoMemory, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
  XLA_FFI_Error* alone = nullptr;
  for (int64_t h = 1, threads = threads_of(frame); !alone && h < threads && h < pieces; ++h) {
    job->users.fetch_add(1, std::memory_order_relaxed);
    XLA_FFI_ThreadPool_Schedule_Args task = {};
    task.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    task.ctx = frame->ctx;
    task.task = Job<Work>::help;
    task.data = job;
    alone = frame->api->XLA_FFI_ThreadPool_Schedule(&task);
    if (alone) job->users.fetch_sub(1, std::memory_order_relaxed);  // not the last: the caller is one
  }
  if (alone) drop(frame, alone);
  job->run();
  for (int spins = 0; job->done.load(std::memory_order_acquire) < pieces; ++spins)
    if (spins > 1000) sched_yield();
  const bool failed = job->failed.load(std::memory_order_relaxed);
  job->leave();
  return failed ? refuse(frame, kNoMemory, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED) : nullptr;
}

// Whether XLA only asks what interface this was made for; answers it.
inline bool answered(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start == nullptr || frame->extension_start->type != XLA_FFI_Extension_Metadata) return false;
  auto* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return true;
}

inline const XLA_FFI_Buffer& argument(XLA_FFI_CallFrame* frame, int i) { return *static_cast<XLA_FFI_Buffer*>(frame->args.args[i]); }
inline const XLA_FFI_Buffer& result(XLA_FFI_CallFrame* frame, int i = 0) { return *static_cast<XLA_FFI_Buffer*>(frame->rets.rets[i]); }

template <typename T>
T* data(const XLA_FFI_Buffer& buffer) {
  return static_cast<T*>(buffer.data);
}

// Whether a buffer has this type and these dimensions.
inline bool shaped(const XLA_FFI_Buffer& buffer, XLA_FFI_DataType dtype, int64_t rank, int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0) {
  const int64_t want[] = {a, b, c, d};
  bool same = buffer.dtype == dtype && buffer.rank == rank;
  for (int i = 0; same && i < rank; ++i) same = buffer.dims[i] == want[i];
  return same;
}

// Memory that a thread works in; grows, and goes with the thread. Null where there is none.
struct Room {
  float* at = nullptr;
  int64_t size = 0;
  ~Room() { free(at); }
  float* of(int64_t wanted) {
    if (wanted > size) {
      free(at);
      at = static_cast<float*>(aligned_alloc(64, (wanted * sizeof(float) + 63) / 64 * 64));
      size = at ? wanted : 0;
    }
    return at;
  }
};

}  // namespace

#endif
