// Hopper's instructions for kernels in CUDA C++: barriers, TMA, wgmma's operands, stores. Source: the PTX manual.
//
// Shared memory is addressed as the 32 bits that these instructions take. IS_BF16 is 1 for bfloat16, 0 for float16; with
// IS_FP8 of 1 that is the dtype of the output alone, and operands are fp8 (e4m3). hopper_source.py adds `multiply<columns>`, the wgmma of each number of columns that a kernel needs.

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };

#if IS_FP8
#define OPERANDS "k32.f32.e4m3.e4m3"
#define LAYOUTS(of_both) ""  // K is contiguous in both
#elif IS_BF16
#define OPERANDS "k16.f32.bf16.bf16"
#define LAYOUTS(of_both) of_both
#else
#define OPERANDS "k16.f32.f16.f16"
#define LAYOUTS(of_both) of_both
#endif

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

// Return the value of a warp's first thread. It tells the compiler that the whole warp has the same value, so that
// branches on it do not diverge and addresses from it are computed once per warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// Return true for one thread of a converged warp, always the same. Prefer it to a comparison of threadIdx around TMA: the
// compiler knows that a single thread is active. Else it makes each TMA instruction a loop over the active threads, some
// 100 cycles.
__device__ __forceinline__ bool elected() {
  u32 yes;
  asm volatile("{\n.reg .pred yes;\nelect.sync _|yes, 0xffffffff;\nselp.u32 %0, 1, 0, yes;\n}" : "=r"(yes));
  return yes;
}

// Sum up the values of a warp's threads, up to each thread's own.
__device__ __forceinline__ int sums_up_to(int value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int left = __shfl_up_sync(0xffffffff, value, distance);
    if (threadIdx.x % 32 >= distance) value += left;
  }
  return value;
}

// --- barriers --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void set_up_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra END;\nbra AGAIN;\nEND:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

// Arrive at the same barrier of one of the cluster's programs. The default scope is right: only the other program's
// loads follow, and they are ordered by the barrier. `.release.cluster` would flush all writes, a third of the time.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 program) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(program) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ int read(u32 from) {
  int value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ float read_float(u32 from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ float2 read_floats(u32 from) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint4 read_16(u32 from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(from) : "memory");
  return value;
}

// Write a number into the same place of one of the cluster's programs. It counts as 4 bytes at that program's barrier.
__device__ __forceinline__ void send(int value, u32 to, u32 ready, u32 program) {
  asm volatile(
      "{\n.reg .b32 there, barrier;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %1, [barrier];\n}" ::
      "r"(to), "r"(value), "r"(ready), "r"(program) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ u32 program_of_cluster() {
  u32 program;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(program));
  return program;
}

// --- TMA -------------------------------------------------------------------------------------------------------------

// Load a box into the same place of every program in `programs`, a mask, or of this one alone if it is 0.
__device__ __forceinline__ void load_2d(u32 to, const TensorMap* map, int x, int y, u32 ready, unsigned short programs) {
  if (programs)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::
        "r"(to), "l"(map), "r"(x), "r"(y), "r"(ready), "h"(programs) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
        "r"(to), "l"(map), "r"(x), "r"(y), "r"(ready) : "memory");
}

__device__ __forceinline__ void load_3d(u32 to, const TensorMap* map, int x, int y, int z, u32 ready,
                                        unsigned short programs) {
  if (programs)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::
        "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(ready), "h"(programs) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::
        "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(ready) : "memory");
}

__device__ __forceinline__ void load_4d(u32 to, const TensorMap* map, int x, int y, int z, int w, u32 ready,
                                        unsigned short programs) {
  if (programs)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::
        "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(ready), "h"(programs) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::
        "r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(ready) : "memory");
}

// Load some bytes, a multiple of 16.
__device__ __forceinline__ void copy(u32 to, const void* from, int bytes, u32 ready) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
               "r"(to), "l"(from), "r"(bytes), "r"(ready) : "memory");
}

// The same with a policy for L2; see below.
__device__ __forceinline__ void copy(u32 to, const void* from, int bytes, u32 ready, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
      "r"(to), "l"(from), "r"(bytes), "r"(ready), "l"(policy) : "memory");
}

// Let this program see a map in global memory that was written before the launch.
__device__ __forceinline__ void see_map(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// Policies for L2: data that is not read again may leave before the rest does, or stay like the rest.
__device__ __forceinline__ u64 leaves_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 stays() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void store_3d(const TensorMap* map, int x, int y, int z, u32 from, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], %5;\n"
      "cp.async.bulk.commit_group;" ::
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(from), "l"(policy) : "memory");
}

__device__ __forceinline__ void store_4d(const TensorMap* map, int x, int y, int z, int w, u32 from, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2, %3, %4}], [%5], %6;\n"
      "cp.async.bulk.commit_group;" ::
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(from), "l"(policy) : "memory");
}

// Wait until at most PENDING of this thread's stores still read shared memory.
template <int PENDING>
__device__ __forceinline__ void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Make writes to shared memory visible to TMA.
__device__ __forceinline__ void publish_to_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- products --------------------------------------------------------------------------------------------------------

// Describe a tile with the 128-byte swizzle to wgmma. `lead` is in units of 16 bytes. An address within a cluster has the
// program's number in its upper bits.
__device__ __forceinline__ u64 described(u32 address, u32 lead) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)lead << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most PENDING committed groups of products are unfinished.
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ u32 two(float first, float second) {
  u32 both;
#if IS_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#endif
  return both;
}

// Write 16 rows and 16 columns of a warp's sums, eight for each thread; each thread addresses 16 bytes of a row.
__device__ __forceinline__ void write_sums(u32 to, const float* s) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::
               "r"(to), "r"(two(s[0], s[1])), "r"(two(s[2], s[3])), "r"(two(s[4], s[5])), "r"(two(s[6], s[7])) : "memory");
}

// --- groups of warps -------------------------------------------------------------------------------------------------

template <int REGISTERS>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// The four warps of a group meet at a numbered barrier.
__device__ __forceinline__ void meet_warps(int barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }

// Two groups of four warps meet at a numbered barrier: one waits, the other goes on.
__device__ __forceinline__ void wait_for_group(int barrier) { asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory"); }

__device__ __forceinline__ void let_group_go(int barrier) { asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory"); }
