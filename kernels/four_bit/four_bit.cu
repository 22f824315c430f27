// Grouped GEMM with four-bit weights for Hopper: the kernel of hopper.py, which describes it; layout.py has the layout.
//
//     out[start_g:end_g].T = w[g] @ a[start_g:end_g].T        a [M, K]   w [G, N, K]   out [M, N]
//
// A program has two groups of four warps that multiply, and further warps, of which one thread loads. Each group has BLOCKS
// blocks of 64 rows of weights. It makes their values in registers, the left operand of wgmma, while the products of the block
// before are computed.
//
// values.cuh has its constants.

struct Tile {
  int group, start, size;  // a group, its first row and its number of rows
  int row, column, count;  // of its output; blocks of 64 columns
};

// The tiles of this program, one after another. A whole warp calls it. `last` has the tiles up to each group's end. With few
// rows, it counts blocks of 64 rows of weights instead. In each round, a program takes TILE_BLOCKS of them, and in the last
// round as many as any other, so all programs end together.
struct Tiles {
  const int *last, *offs;
  int G, row_blocks, tiles_n, number, end, round, from;

  __device__ __forceinline__ void begin_round() {
    const int programs = gridDim.x, program = blockIdx.x, blocks = min(last[G - 1] - round, programs * TILE_BLOCKS);
    number = round + blocks * program / programs, end = round + blocks * (program + 1) / programs;
    round += programs * TILE_BLOCKS;
  }

  __device__ __forceinline__ bool next(Tile& tile) {
    const int lane = threadIdx.x % 32;
    u32 after = 0;
    if (FEW && number == end) {
      if (round < last[G - 1]) begin_round();
      if (number == end) return false;
    }
    for (; from < G; from += 32) {
      after = __ballot_sync(0xffffffff, from + lane < G && last[from + lane] > number);
      if (after) break;
    }
    if (!after) return false;
    tile.group = from + __ffs(after) - 1;
    const int before = tile.group ? last[tile.group - 1] : 0;
    tile.start = tile.group ? offs[tile.group - 1] : 0;
    tile.size = offs[tile.group] - tile.start;
    const int tiles_m = (tile.size + ROWS - 1) / ROWS, inside = number - before;
    if (FEW) {
      int block = inside, width = row_blocks;
      if (tiles_m > 1) {  // all rows of a group, then its next TILE_BLOCKS blocks; those are in L2 meanwhile
        const int turn = inside / (TILE_BLOCKS * tiles_m), within = inside - turn * TILE_BLOCKS * tiles_m;
        width = min(row_blocks, (turn + 1) * TILE_BLOCKS);
        tile.row = within / (width - turn * TILE_BLOCKS) * ROWS;
        block = turn * TILE_BLOCKS + within % (width - turn * TILE_BLOCKS);
      } else {
        tile.row = 0;
      }
      tile.column = block * 64;
      tile.count = min(width - block, end - number);
      number += tile.count;
      return true;
    }
    number += gridDim.x;
    const int blocks = max((tiles_m + GROUP_M / 2) / GROUP_M, 1), height = (tiles_m + blocks - 1) / blocks;
    const int block = inside / (height * tiles_n), within = inside - block * height * tiles_n;
    const int rows = min(tiles_m - block * height, height);
    tile.row = (block * height + within % rows) * ROWS;
    tile.column = within / rows * TILE_BLOCKS * 64;
    tile.count = min(row_blocks - tile.column / 64, TILE_BLOCKS);
    return true;
  }
};

// Sum up the tiles of the groups, by all threads.
__device__ __forceinline__ void count_tiles(const OFFSET* end_offsets, int G, int tiles_n, int* last, int* offs, int* sums) {
  const int lane = threadIdx.x % 32;
  for (int from = threadIdx.x - lane; from < G; from += blockDim.x) {
    const int g = from + lane;
    const int end = g < G ? (int)end_offsets[g] : 0, start = g < G && g ? (int)end_offsets[g - 1] : 0;
    const int tiles = sums_up_to((end - start + ROWS - 1) / ROWS * tiles_n);
    if (g < G) last[g] = tiles, offs[g] = end;
    if (lane == 31) sums[from / 32] = tiles;
  }
  __syncthreads();
  for (int from = threadIdx.x - lane; from < G; from += blockDim.x) {
    int before = 0;
    for (int i = lane; i < from / 32; i += 32) before += sums[i];
    for (int distance = 16; distance; distance /= 2) before += __shfl_xor_sync(0xffffffff, before, distance);
    if (from + lane < G) last[from + lane] += before;
  }
  __syncthreads();
}

struct Ring {
  int at;
  u32 phase;

  __device__ __forceinline__ void next() {
    if (++at == STAGES) at = 0, phase ^= 1;
  }
};

// --- the kernel ------------------------------------------------------------------------------------------------------

struct Operands {
  const TensorMap *a, *out;
  const unsigned char* weights;  // [blocks of rows, blocks of K, BLOCK_BYTES] for each group
  const float* factors;          // [G, blocks of rows * 64]; null without FLOATING
  const void* bias;              // [G, N] bf16
  const float* token_scales;     // [M], or [blocks of K, M]
  int M, N, row_blocks, k_blocks;
};

__device__ __forceinline__ void load_tiles(const Operands& x, Tiles tiles, u32 memory, u32 full, u32 empty) {
  Ring ring = {0, 1};
  Tile tile;
  const u64 once = leaves_first(), again = stays();  // weights must not displace activations, which are read again
  while (tiles.next(tile)) {
    const unsigned char* from =
        x.weights + ((long long)tile.group * x.row_blocks + tile.column / 64) * x.k_blocks * (long long)BLOCK_BYTES;
    const u64 policy = tile.size <= ROWS ? once : again;
    for (int k = 0; k < x.k_blocks; k += DEPTH) {
      const int depth = min(x.k_blocks - k, DEPTH);
      wait_for(empty + 8 * ring.at, ring.phase);
      if (elected()) {
        const u32 to = memory + ring.at * STAGE_BYTES, ready = full + 8 * ring.at;
        const int boxes = !FEW ? 1 : (min(tile.size - tile.row, ROWS) + 7) / 8;
        expect(ready, (BY_STAGE ? DEPTH : depth) * boxes * BOX_BYTES + depth * tile.count * BLOCK_BYTES);
        for (int i = 0; i < tile.count; ++i)
          copy(to + DEPTH * A_BYTES + i * W_BYTES, from + ((long long)i * x.k_blocks + k) * BLOCK_BYTES, depth * BLOCK_BYTES,
               ready, policy);
        for (int box = 0; box < boxes; ++box) {
          const int row = tile.start + tile.row + box * 8;
          if (BY_STAGE)
            load_3d(to + box * BOX_PITCH, x.a, 0, row, k, ready, 0);
          else
            for (int i = 0; i < depth; ++i)
              load_2d(to + box * BOX_PITCH + i * DEPTH_PITCH, x.a, (k + i) * BLOCK_K, row, ready, 0);
        }
      }
      __syncwarp();
      ring.next();
    }
  }
}

struct Worker {
  const Operands& x;
  Ring ring;
  u32 memory, full, empty, tables, mask;
  int number, thread;
  int held;  // the stage that unfinished products read
  int next_buffer;

  __device__ __forceinline__ void give_back(int stage) {
    if (elected()) arrive(empty + 8 * stage);
  }

  __device__ __forceinline__ u32 block_at(int depth, int e) const {
    return memory + ring.at * STAGE_BYTES + DEPTH * A_BYTES + (number * BLOCKS + e) * W_BYTES + depth * BLOCK_BYTES;
  }

  __device__ __forceinline__ void values_of(int depth, u32 (&values)[BLOCKS][SLICES][4]) const {
#pragma unroll
    for (int e = 0; e < BLOCKS; ++e)
#if A8
      make_values(block_at(depth, e), thread, tables, values[e]);
#else
      make_values(block_at(depth, e), thread, mask, values[e]);
#endif
  }

  // Start the products of some slices of a block of K.
  template <int from = 0, int to = SLICES>
  __device__ __forceinline__ void start(float (&sums)[BLOCKS][ROWS / 2], const u32 (&values)[BLOCKS][SLICES][4], int depth,
                                        bool first) const {
    const u64 a = described(memory + ring.at * STAGE_BYTES + depth * A_BYTES, 1);
    start_products();
#pragma unroll
    for (int i = from; i < to; ++i)
#pragma unroll
      for (int e = 0; e < BLOCKS; ++e) multiply_values<ROWS>(sums[e], values[e][i], a + 2 * i, !first || i > from);
    commit_products();
  }

  // Wait for a stage and make the values of its only block.
  __device__ __forceinline__ void take(u32 (&values)[BLOCKS][SLICES][4]) const {
    wait_for(full + 8 * ring.at, ring.phase);
    values_of(0, values);
  }

  // Start the products of block k, and give the stage of the block before back; then take the next block, if there is one.
  __device__ __forceinline__ bool overlap(float (&sums)[BLOCKS][ROWS / 2], const u32 (&values)[BLOCKS][SLICES][4],
                                          u32 (&next)[BLOCKS][SLICES][4], int k, int count) {
    start(sums, values, 0, k == 0);
    wait_for_products<1>();
    if (k) give_back(held);
    held = ring.at;
    ring.next();
    if (k + 1 == count) return false;
    take(next);
    return true;
  }
};

// Multiply all blocks of K, with one in a stage. The values of a block are made while the products of the one before run.
__device__ __forceinline__ void multiply_tile(Worker& worker, float (&sums)[BLOCKS][ROWS / 2]) {
  u32 even[BLOCKS][SLICES][4], odd[BLOCKS][SLICES][4];
  const int count = worker.x.k_blocks;
  worker.take(even);
  for (int k = 0; k < count; k += 2) {
    if (!worker.overlap(sums, even, odd, k, count)) break;
    if (!worker.overlap(sums, odd, even, k + 1, count)) break;
  }
  wait_for_products<0>();
  worker.give_back(worker.held);
}

// Call `multiply` for every block of K, by stages of several blocks. With all offsets in a stage known to the compiler, it
// takes half the instructions; the last stage may have fewer blocks.
template <typename Multiply, typename Finish>
__device__ __forceinline__ void for_stages(Worker& worker, Multiply multiply, Finish finish) {
  for (int k = 0; k < worker.x.k_blocks; k += DEPTH) {
    wait_for(worker.full + 8 * worker.ring.at, worker.ring.phase);
    if (DEPTH == 1 || k + DEPTH <= worker.x.k_blocks) {
#pragma unroll
      for (int depth = 0; depth < DEPTH; ++depth) multiply(k, depth, false);
    } else {
#pragma unroll 1
      for (int depth = 0; k + depth < worker.x.k_blocks; ++depth) multiply(k, depth, true);
    }
    finish();
    __syncwarp();
    worker.give_back(worker.ring.at);
    worker.ring.next();
  }
}

// The same as multiply_tile for stages of several blocks. Few rows leave little to overlap with, and other warps hide the
// wait at a stage's end.
__device__ __forceinline__ void multiply_tile_by_stage(Worker& worker, float (&sums)[BLOCKS][ROWS / 2]) {
  for_stages(
      worker,
      [&](int k, int depth, bool looped) {
        u32 values[BLOCKS][SLICES][4];
        worker.values_of(depth, values);
        worker.start(sums, values, depth, k == 0 && depth == 0);
        looped ? wait_for_products<0>() : wait_for_products<1>();  // a loop makes the next values in the same registers
      },
      [] { wait_for_products<0>(); });
}

#if !A8
__device__ __forceinline__ void load_matrices(u32 from, u32* to) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" :
               "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
}

__device__ __forceinline__ void add_product(float* sums, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};" : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) :
               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same by mma, with up to `most` times eight rows of activations. A wgmma with values from registers takes 32 cycles at
// least, as long as four of these. The order of a thread's values and sums is the same.
template <int most>
__device__ __forceinline__ void multiply_few(Worker& worker, int rows, float (&sums)[BLOCKS][ROWS / 2]) {
  if constexpr (most > 1)
    if (rows <= (most - 1) * 8) return multiply_few<most - 1>(worker, rows, sums);
  const int lane = worker.thread % 32, line = lane % 8;
  const u32 low = line * K_BYTES + ((lane / 8 ^ line) << 4), high = low ^ 64;  // 16 bytes of 8 rows, four times
#pragma unroll
  for (int e = 0; e < BLOCKS; ++e)
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) sums[e][i] = 0;
  for_stages(
      worker,
      [&](int, int depth, bool) {
        const u32 activations = worker.memory + worker.ring.at * STAGE_BYTES + depth * DEPTH_PITCH;
        u32 values[BLOCKS][SLICES][4];
        worker.values_of(depth, values);
#pragma unroll
        for (int group = 0; group < most; ++group) {
          u32 a[SLICES][2];
          load_matrices(activations + group * BOX_PITCH + low, a[0]);
          load_matrices(activations + group * BOX_PITCH + high, a[2]);
#pragma unroll
          for (int i = 0; i < SLICES; ++i)
#pragma unroll
            for (int e = 0; e < BLOCKS; ++e) add_product(&sums[e][group * 4], values[e][i], a[i]);
        }
      },
      [] {});
}
#endif

#if A8
// Start the products of some groups of weights.
template <int group, int slices, int count, int parts>
__device__ __forceinline__ void start_groups(const Worker& worker, float (&part)[parts][BLOCKS][ROWS / 2],
                                             const u32 (&values)[BLOCKS][SLICES][4], int depth) {
  if constexpr (count > 0) {
    worker.start<group * slices, (group + 1) * slices>(part[parts - count], values, depth, true);
    start_groups<group + 1, slices, count - 1>(worker, part, values, depth);
  }
}

// Multiply the slices of some groups of weights, scale the sums and add them; then the same for the block's next groups.
template <int group>
__device__ __forceinline__ void multiply_groups(const Worker& worker, const Tile& tile, float (&sums)[BLOCKS][ROWS / 2],
                                                const u32 (&values)[BLOCKS][SLICES][4], int k, int depth) {
  constexpr int PARTS = FLOATING ? 1 : GROUPS, COUNT = SLICES / PARTS;
  constexpr int FIT = ROWS <= 16 ? 4 : ROWS <= 32 ? 2 : 1, AT_ONCE = FIT < PARTS ? FIT : PARTS;
  if constexpr (group < PARTS) {
    float part[AT_ONCE][BLOCKS][ROWS / 2];
    start_groups<group, COUNT, AT_ONCE>(worker, part, values, depth);
    float of_row[AT_ONCE][BLOCKS][2];
#pragma unroll
    for (int g = 0; g < AT_ONCE; ++g)
#pragma unroll
      for (int e = 0; e < BLOCKS; ++e) {
        const u32 at = worker.block_at(depth, e) + CODE_BYTES + (group + g) * 128 + worker.thread / 4 * 4;
        const u32 both = FLOATING ? 0x3F803F80 : load32(at);  // of two rows; of mxfp4, ones
        of_row[g][e][0] = __uint_as_float(both << 16), of_row[g][e][1] = __uint_as_float(both & 0xffff0000);
      }
    wait_for_products<0>();
    const float* of_tokens = worker.x.token_scales + (long long)k * worker.x.M;
#pragma unroll
    for (int g = 0; g < AT_ONCE; ++g)
#pragma unroll
      for (int e = 0; e < BLOCKS; ++e)
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
          float of_token = 1;
          if (TOKEN_SCALES == 2)
            of_token = of_tokens[min(tile.start + tile.row + i / 4 * 8 + worker.thread % 4 * 2 + i % 2, worker.x.M - 1)];
          sums[e][i] += part[g][e][i] * (of_row[g][e][i / 2 % 2] * of_token);
        }
    multiply_groups<group + AT_ONCE>(worker, tile, sums, values, k, depth);
  }
}

__device__ __forceinline__ void multiply_tile_by_group(Worker& worker, const Tile& tile, float (&sums)[BLOCKS][ROWS / 2]) {
  u32 values[BLOCKS][SLICES][4];
#pragma unroll
  for (int e = 0; e < BLOCKS; ++e)
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) sums[e][i] = 0;
  for_stages(
      worker,
      [&](int k, int depth, bool) {
        worker.values_of(depth, values);
        multiply_groups<0>(worker, tile, sums, values, k + depth, depth);
      },
      [] {});
}
#endif

__device__ __forceinline__ float of_bf16(unsigned short bits) { return __uint_as_float((u32)bits << 16); }

// Write 8 rows of the output, and 16 with `both`, for a warp's 16 columns: sums are transposed on the way.
template <bool both>
__device__ __forceinline__ void write_transposed(u32 to, const float* s) {
  if (both)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::
                 "r"(to), "r"(two(s[0], s[1])), "r"(two(s[2], s[3])), "r"(two(s[4], s[5])), "r"(two(s[6], s[7])) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::
                 "r"(to), "r"(two(s[0], s[1])), "r"(two(s[2], s[3])) : "memory");
}

// What a thread multiplies and adds to its sums, for its rows of weights, column and column + 8 of the output, and, in tiles of
// few rows, for its rows of activations. It is loaded before the products, which hide the latency.
struct Finish {
  float factor[BLOCKS][2], bias[BLOCKS][2], of_token[!FEW ? 1 : ROWS / 4];
};

__device__ __forceinline__ float token_scale(const Operands& x, const Tile& tile, int thread, int i, int j) {
  return x.token_scales[tile.start + min(tile.row + i * 8 + thread % 4 * 2 + j, tile.size - 1)];
}

__device__ __forceinline__ void load_finish(const Worker& worker, const Tile& tile, Finish& finish) {
  const Operands& x = worker.x;
#pragma unroll
  for (int e = 0; e < BLOCKS; ++e)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int block = min(tile.column / 64 + worker.number * BLOCKS + e, x.row_blocks - 1);
      const int column = block * 64 + worker.thread / 32 * 16 + worker.thread % 32 / 4 + 8 * i;
      finish.factor[e][i] = FLOATING ? x.factors[(long long)tile.group * x.row_blocks * 64 + column] : INTEGER_UNIT;
      finish.bias[e][i] =
          BIAS ? of_bf16(((const unsigned short*)x.bias)[(long long)tile.group * x.N + min(column, x.N - 1)]) : 0;
    }
  if (TOKEN_SCALES == 1 && FEW)
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) finish.of_token[i] = token_scale(x, tile, worker.thread, i / 2, i % 2);
}

__device__ __forceinline__ void store_tile(Worker& worker, const Tile& tile, const Finish& finish,
                                           float (&sums)[BLOCKS][ROWS / 2], u32 buffers, u64 policy) {
  const Operands& x = worker.x;
  const int lane = worker.thread % 32, warp = worker.thread / 32;
  const int matrix = lane / 8, line = lane % 8 + (matrix / 2) * 8;  // of the output's buffer, whose address a thread gives
  const u32 place = line * 128 + ((warp * 2 + matrix % 2 ^ line % 8) << 4);
#pragma unroll
  for (int e = 0; e < BLOCKS; ++e) {
    const int block = tile.column / 64 + worker.number * BLOCKS + e;
    if (worker.number * BLOCKS + e >= tile.count) continue;
#pragma unroll
    for (int chunk = 0; chunk < ROWS / OUT_ROWS; ++chunk) {
      const int row = tile.row + chunk * OUT_ROWS;
      if (row >= tile.size) break;
      float* s = &sums[e][chunk * OUT_ROWS / 2];
#pragma unroll
      for (int i = 0; i < OUT_ROWS / 8; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float of_token = 1;
          const int group = chunk * (OUT_ROWS / 8) + i;
          if (TOKEN_SCALES == 1)
            of_token = !FEW ? token_scale(x, tile, worker.thread, group, j) : finish.of_token[group * 2 + j];
          s[i * 4 + j] = s[i * 4 + j] * finish.factor[e][0] * of_token + finish.bias[e][0];
          s[i * 4 + j + 2] = s[i * 4 + j + 2] * finish.factor[e][1] * of_token + finish.bias[e][1];
        }
      const u32 buffer = buffers + worker.next_buffer * OUT_BYTES;
      worker.next_buffer = (worker.next_buffer + 1) % BUFFERS;
      if (worker.thread == 0) wait_for_reads<BUFFERS - 1>();
      meet_warps(1 + worker.number);
      write_transposed<OUT_ROWS == 16>(buffer + place, s);
      publish_to_tma();
      meet_warps(1 + worker.number);
      if (worker.thread == 0)
        store_4d(x.out, block * 64, BILLION - tile.size + row, tile.start + tile.size, BILLION, buffer, policy);
    }
  }
}

// Multiply and store a tile.
__device__ __forceinline__ void compute_tile(Worker& worker, const Tile& tile, u32 buffers, u64 policy) {
  if (worker.number * BLOCKS >= tile.count) return for_stages(worker, [](int, int, bool) {}, [] {});
  Finish finish;
  if (FEW) load_finish(worker, tile, finish);
#if !A8
  if constexpr (FEW) {
    const int rows = uniform(tile.size - tile.row);
    if (ROWS <= BY_MMA || rows <= BY_MMA) {
      float sums[BLOCKS][ROWS / 2];
      multiply_few<(ROWS < BY_MMA ? ROWS : BY_MMA) / 8>(worker, rows, sums);
      return store_tile(worker, tile, finish, sums, buffers, policy);
    }
  }
#endif
  float sums[BLOCKS][ROWS / 2];
#if A8
  if constexpr (PROMOTES)
    multiply_tile_by_group(worker, tile, sums);
  else
#endif
      if constexpr (DEPTH > 1)
    multiply_tile_by_stage(worker, sums);
  else
    multiply_tile(worker, sums);
  if (!FEW) load_finish(worker, tile, finish);
  store_tile(worker, tile, finish, sums, buffers, policy);
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM)
    four_bit_kernel(const __grid_constant__ TensorMap a,    // [M, K], boxes of ROWS and K_BYTES
                    const __grid_constant__ TensorMap out,  // ragged along M, boxes of [OUT_ROWS, 64]
                    void* out_rows,                         // the same memory
                    const unsigned char* weights, const float* factors, const void* bias, const float* token_scales,
                    const unsigned char* table,             // [16, 8] or [16, 16] e4m3
                    const OFFSET* end_offsets,              // [G]
                    int G, int rows, int M, int N, int k_blocks) {  // M: rows to set to zero past the last group; 0: none
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ u64 full_barriers[STAGES], empty_barriers[STAGES];
  __shared__ int last[MOST_GROUPS], offs[MOST_GROUPS], chunk_sums[MOST_GROUPS / 32];
  __shared__ __align__(16) unsigned char tables[256];
  const u32 memory = kept(shared_address(dynamic));
  const u32 full = kept(shared_address(full_barriers)), empty = kept(shared_address(empty_barriers));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      set_up_barrier(full + 8 * stage, 1);
      set_up_barrier(empty + 8 * stage, 4 * WORKERS);
    }
    publish_barriers();
  }
  // Without fp8, only a mask: the compiler would load a constant into a register before each use.
  if (threadIdx.x < 64) ((u32*)tables)[threadIdx.x] = A8 ? ((const u32*)table)[threadIdx.x] : MASK_OF_INTEGERS;
  const int row_blocks = (N + 63) / 64, tiles_n = FEW ? row_blocks : (row_blocks + TILE_BLOCKS - 1) / TILE_BLOCKS;
  count_tiles(end_offsets, G, tiles_n, last, offs, chunk_sums);

  const Operands x = {&a, &out, weights, factors, bias, token_scales, rows, N, row_blocks, k_blocks};
  Tiles tiles = {last, offs, G, row_blocks, tiles_n, FEW ? 0 : (int)blockIdx.x, 0, 0, 0};
  const int role = uniform(threadIdx.x / 128);
  if (role == WORKERS) {
    if (CLAIMS) give_up_registers<40>();
    if (uniform(threadIdx.x / 32) == 4 * WORKERS) load_tiles(x, tiles, memory, full, empty);
  } else {
    if (CLAIMS) claim_registers<WORKERS == 3 ? 152 : 232>();
    const u32 at = shared_address(tables), mask = A8 ? 0 : load32(at);
    Worker worker = {x, {0, 0}, memory, full, empty, at, mask, role, (int)threadIdx.x % 128, 0, 0};
    const u32 buffers = memory + STAGES * STAGE_BYTES + worker.number * BUFFERS * OUT_BYTES;
    const u64 policy = stays();
    Tile tile;
    while (tiles.next(tile)) {
      // They are the same for all threads, but from one tile to the next the compiler loses sight of it.
      worker.ring.at = uniform(worker.ring.at);
      worker.ring.phase = uniform(worker.ring.phase);
      compute_tile(worker, tile, buffers, policy);
    }
    if (worker.thread == 0) wait_for_stores();
  }

  // Rows past the last group belong to none. A row is a multiple of 16 bytes.
  for (long long row = offs[G - 1] + blockIdx.x; row < M; row += gridDim.x)
    for (int i = threadIdx.x; i < N / 8; i += blockDim.x) ((uint4*)out_rows)[row * (N / 8) + i] = make_uint4(0, 0, 0, 0);
}
