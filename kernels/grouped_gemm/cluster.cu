// Grouped GEMM in 16 bits for Hopper, with clusters of two SMs: the kernel of cluster.py, which describes it.
//
//     out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]
//
// cluster.py defines these constants:
//
//     B_IS_NK    1 if b is stored as [G, N, K], 0 if as [G, K, N]
//     SHARED_B   1 if all groups share one matrix
//     IS_BF16    1 for bfloat16, 0 for float16
//     OFFSET     type of the end offsets: int or long long
//     GROUP_M    cluster tile rows of a block (tile_order.serpentine)
//     LOCKSTEP   steps of K between two waits (lockstep.py); 0: none
//     STAGES     of shared memory, each with the operands of one step
//     BUFFERS    for the output, of 64 rows and 64 columns, for each group of warps
//     MOST_GROUPS, LEAD, ARRIVALS, POLLS   the constants of cluster.py and lockstep.py

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };

constexpr int PARTS = 2;                    // groups of four warps that multiply, 64 rows each
constexpr int ROWS = 64;                    // of a part: the least that wgmma multiplies
constexpr int COLUMNS = 256;                // of a tile: the most that wgmma multiplies
constexpr int BLOCK_K = 64;                 // 128 bytes, the widest swizzle
constexpr int PAIR = 2 * PARTS;             // parts of a cluster's tile
constexpr int A_BYTES = PARTS * ROWS * BLOCK_K * 2;
constexpr int B_BYTES = COLUMNS * BLOCK_K * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int OUT_WIDTH = 64;
constexpr int OUT_BYTES = ROWS * OUT_WIDTH * 2;
constexpr int BILLION = 0x40000000;         // of the ragged output's tensor map, as in triton.tools.ragged_tma
constexpr int LOAD_REGISTERS = 40, MULTIPLY_REGISTERS = 232;  // 40 + 2 * 232 = 3 * 168, what a launch of 384 threads gets

#if IS_BF16
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif
#if B_IS_NK
#define TRANSPOSE_B "0"
constexpr int B_NEXT = 2;                   // in units of 16 bytes, to the next 16 of K
constexpr int B_LEAD = 1;                   // unused with this layout
#else
#define TRANSPOSE_B "1"
constexpr int B_NEXT = 128;
constexpr int B_LEAD = B_BYTES / 4 / 16;    // between two blocks of 64 columns
#endif

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void set_up_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

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

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void load_rows(u32 to, const TensorMap* map, int k, int row, u32 ready) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
      "r"(to), "l"(map), "r"(k), "r"(row), "r"(ready) : "memory");
}

// Load a box of weights into the same place of both programs.
__device__ __forceinline__ void load_weights(u32 to, const TensorMap* map, int x, int y, int matrix, u32 ready) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::
      "r"(to), "l"(map), "r"(x), "r"(y), "r"(matrix), "r"(ready), "h"((short)3) : "memory");
}

// The output is not read again: it should leave L2 before the operands do.
__device__ __forceinline__ void store_part(const TensorMap* map, int column, int inside, int end, u32 from, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2, %3, %4}], [%5], %6;\n"
      "cp.async.bulk.commit_group;" ::
      "l"(map), "r"(column), "r"(inside), "r"(end), "r"(BILLION), "r"(from), "l"(policy) : "memory");
}

// Describe a tile with the 128-byte swizzle to wgmma. `lead` is in units of 16 bytes. An address within a cluster has the
// program's number in its upper bits.
__device__ __forceinline__ u64 described(u32 address, u32 lead) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)lead << 16 | 64ull << 32 | 1ull << 62;
}

// Start sums = a @ b, or sums += a @ b if `add`: 64 rows, 256 columns, 16 of K.
__device__ __forceinline__ void multiply(float (&sums)[128], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, add, 1, 1, 0, " TRANSPOSE_B ";\n}"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
        "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]),
        "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]),
        "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
        "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]),
        "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),
        "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
        "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
        "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]),
        "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
        "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]),
        "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]),
        "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]),
        "+f"(sums[64]), "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]),
        "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]),
        "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]),
        "+f"(sums[76]), "+f"(sums[77]), "+f"(sums[78]), "+f"(sums[79]),
        "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]),
        "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]),
        "+f"(sums[88]), "+f"(sums[89]), "+f"(sums[90]), "+f"(sums[91]),
        "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95]),
        "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]),
        "+f"(sums[100]), "+f"(sums[101]), "+f"(sums[102]), "+f"(sums[103]),
        "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]), "+f"(sums[107]),
        "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111]),
        "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), "+f"(sums[115]),
        "+f"(sums[116]), "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]),
        "+f"(sums[120]), "+f"(sums[121]), "+f"(sums[122]), "+f"(sums[123]),
        "+f"(sums[124]), "+f"(sums[125]), "+f"(sums[126]), "+f"(sums[127])
      : "l"(a), "l"(b), "r"(add));
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

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

struct Tile {
  int group, start, size;  // a group, its first row and its number of rows
  int row, parts;          // this program's first row within the group, and how many parts of 64 rows it has
  int column;
};

// Find an item. Items from `whole` on are halves of tiles. `g` must not be greater than the item's group; it becomes it.
__device__ __forceinline__ Tile tile_of(int item, int whole, int& g, const int* last, const int* offs, int tiles_n,
                                        int program) {
  const bool cut = item >= whole;
  const int number = cut ? whole + (item - whole) / 2 : item;
  while (number >= last[g]) ++g;
  Tile tile;
  tile.group = g;
  tile.start = g ? offs[g - 1] : 0;
  tile.size = offs[g] - tile.start;
  const int all = (tile.size + ROWS - 1) / ROWS;
  const int tiles_m = (all + PAIR - 1) / PAIR;
  const int blocks = max((tiles_m + GROUP_M / 2) / GROUP_M, 1);
  const int height = (tiles_m + blocks - 1) / blocks;
  int inside = number - (g ? last[g - 1] : 0);
  const int block = inside / (height * tiles_n);
  inside -= block * height * tiles_n;
  const int rows = min(tiles_m - block * height, height);
  const int column = inside / rows;
  int first = (block * height + inside % rows) * PAIR;
  int parts = min(all - first, PAIR);
  if (cut) {  // each program multiplies one part
    const int half = (item - whole) % 2 * (PAIR / 2);
    first += half;
    parts = max(min(parts - half, PAIR / 2), 0);
  }
  const int of_first = (parts + 1) / 2;
  tile.parts = program ? parts - of_first : of_first;
  tile.row = (first + (program ? of_first : 0)) * ROWS;
  tile.column = (column + block % 2 * (tiles_n - 1 - 2 * column)) * COLUMNS;
  return tile;
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * (PARTS + 1), 1)
    cluster_kernel(const __grid_constant__ TensorMap a,    // [M, K], boxes of [128, 64]
                   const __grid_constant__ TensorMap b,    // [G or 1, N, K] or [G or 1, K, N]: half a tile, or 64 columns
                   const __grid_constant__ TensorMap out,  // ragged along M, boxes of [64, 64]
                   void* out_rows,                         // the same memory
                   const OFFSET* end_offsets,              // [G]
                   u64* arrivals,                          // lockstep.arrivals
                   int G, int M, int N, int K) {           // M: rows to set to zero past the last group; 0: none
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ u64 full[STAGES], empty[STAGES];
  __shared__ int last[MOST_GROUPS], offs[MOST_GROUPS];  // of each group: tiles up to its end, rows up to its end
  u32 program;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(program));
  const int clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
  const int thread = threadIdx.x % 128;
  const int role = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const int tiles_n = (N + COLUMNS - 1) / COLUMNS;
  const int steps = (K + BLOCK_K - 1) / BLOCK_K;
  const u32 stages = shared_address(memory);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      set_up_barrier(shared_address(&full[stage]), 1);
      set_up_barrier(shared_address(&empty[stage]), 2 * PARTS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  for (int g = threadIdx.x; g < G; g += blockDim.x) offs[g] = (int)end_offsets[g];
  __syncthreads();
  if (threadIdx.x < 32) {  // sum up the groups' tiles
    int before = 0;
    for (int from = 0; from < G; from += 32) {
      const int g = from + threadIdx.x;
      const int size = g < G ? offs[g] - (g ? offs[g - 1] : 0) : 0;
      int tiles = (size + PAIR * ROWS - 1) / (PAIR * ROWS) * tiles_n;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int left = __shfl_up_sync(0xffffffff, tiles, distance);
        if (threadIdx.x >= distance) tiles += left;
      }
      if (g < G) last[g] = before + tiles;
      before += __shfl_sync(0xffffffff, tiles, 31);
    }
  }
  __syncthreads();
  cluster_sync();

  // The tiles of a short last wave are cut in two if there are clusters for all halves.
  const int tiles = last[G - 1], in_last_wave = tiles % clusters;
  const bool cut = 2 * in_last_wave <= clusters;
  const int whole = cut ? tiles - in_last_wave : tiles;
  const int items = cut ? tiles + in_last_wave : tiles;

  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGISTERS));
    if (threadIdx.x == 0) {
      int g = 0, stage = 0;
      u32 phase = 1;
#if LOCKSTEP
      // See lockstep.py. A cluster's first program waits for those of other clusters, its second one for the first.
      const u64 launch = (u64)ARRIVALS * clusters;
      u64 reached = *(volatile u64*)arrivals / launch * launch;
      int to_arrive = (int)min((long long)(tiles / clusters) * steps / LOCKSTEP, (long long)ARRIVALS);
      int to_wait = to_arrive, until = LOCKSTEP;
      const int after = ARRIVALS - to_arrive;
#endif
      for (int item = cluster; item < items; item += clusters) {
        const Tile tile = tile_of(item, whole, g, last, offs, tiles_n, program);
        const int matrix = SHARED_B ? 0 : tile.group;
        for (int step = 0; step < steps; ++step) {
#if LOCKSTEP
          if (program == 0) {
            if (until == LEAD && to_arrive > 0) {
              atomicAdd(arrivals, 1ull);
              --to_arrive;
            }
            if (until == 0) {
              until = LOCKSTEP;
              reached += clusters;
              int polls = 0;
              if (to_wait > 0)
                while (polls < POLLS && *(volatile u64*)arrivals < reached) ++polls;
              to_wait = polls < POLLS ? to_wait - 1 : 0;
            }
            --until;
          }
#endif
          wait_for(shared_address(&empty[stage]), phase);
          const u32 ready = shared_address(&full[stage]);
          const u32 at = stages + stage * STAGE_BYTES;
          const int k = step * BLOCK_K;
          expect(ready, tile.parts ? STAGE_BYTES : B_BYTES);
          if (tile.parts) load_rows(at, &a, k, tile.start + tile.row, ready);
#if B_IS_NK
          load_weights(at + A_BYTES + program * (B_BYTES / 2), &b, k, tile.column + program * (COLUMNS / 2), matrix, ready);
#else
          for (int block = 2 * program; block < 2 * (int)program + 2; ++block)
            load_weights(at + A_BYTES + block * (B_BYTES / 4), &b, tile.column + block * 64, k, matrix, ready);
#endif
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
#if LOCKSTEP
      if (program == 0) atomicAdd(arrivals, (u64)(after + to_arrive));
#endif
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLY_REGISTERS));
    const int part = role - 1;
    int g = 0, stage = 0;
    u32 phase = 0;
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    float sums[128];
    for (int item = cluster; item < items; item += clusters) {
      const Tile tile = tile_of(item, whole, g, last, offs, tiles_n, program);
      if (part >= tile.parts) {
        for (int step = 0; step < steps; ++step) {
          wait_for(shared_address(&full[stage]), phase);
          if (thread < 2) arrive_at(shared_address(&empty[stage]), thread);
          if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
          }
        }
        continue;
      }
      int before = 0;
      for (int step = 0; step < steps; ++step) {
        wait_for(shared_address(&full[stage]), phase);
        const u32 at = stages + stage * STAGE_BYTES;
        const u64 rows = described(at + part * (A_BYTES / PARTS), 1);
        const u64 weights = described(at + A_BYTES, B_LEAD);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; ++i) multiply(sums, rows + 2 * i, weights + B_NEXT * i, step | i);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0 && thread < 2) arrive_at(shared_address(&empty[before]), thread);
        before = stage;
        if (++stage == STAGES) {
          stage = 0;
          phase ^= 1;
        }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (thread < 2) arrive_at(shared_address(&empty[before]), thread);

      // Each thread of a warp addresses 16 bytes of a row; 16 rows and 16 columns leave at once. The buffers are swizzled.
      const int lane = thread % 32;
      const int line = thread / 32 * 16 + lane % 16;
      const int row = tile.row + part * ROWS;
      const u32 buffers = stages + STAGES * STAGE_BYTES + part * BUFFERS * OUT_BYTES;
#pragma unroll
      for (int i = 0; i < COLUMNS / OUT_WIDTH; ++i) {
        const u32 buffer = buffers + i % BUFFERS * OUT_BYTES;
        if (thread == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(BUFFERS - 1) : "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(part + 1) : "memory");
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* s = &sums[i * 32 + j * 8];
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::
                       "r"(buffer + line * 128 + ((2 * j + lane / 16 ^ line & 7) << 4)),
                       "r"(two(s[0], s[1])), "r"(two(s[2], s[3])), "r"(two(s[4], s[5])), "r"(two(s[6], s[7])) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;\nbar.sync %0, 128;" ::"r"(part + 1) : "memory");
        if (thread == 0)
          store_part(&out, tile.column + i * OUT_WIDTH, BILLION - tile.size + row, tile.start + tile.size, buffer, policy);
      }
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }

  // Rows past the last group belong to none. A row is a multiple of 16 bytes.
  for (long long row = offs[G - 1] + blockIdx.x; row < M; row += gridDim.x)
    for (int i = threadIdx.x; i < N / 8; i += blockDim.x) ((uint4*)out_rows)[row * (N / 8) + i] = make_uint4(0, 0, 0, 0);

  cluster_sync();  // a program's shared memory must outlive what the other one sends to it
}
