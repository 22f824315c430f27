// Grouped GEMM for Hopper with clusters of two SMs: the kernel of cluster.py, which describes it, and of cluster_fp8.py.
//
//     out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]
//
// Besides the constants of tiles.cuh, SHARED_B is 1 if all groups share one matrix.

struct Forward {
  const TensorMap *a, *b, *out;
  const int *last, *offs;  // of each group: tiles up to its end, rows up to its end
  int N, steps, tiles_n;
  int items, whole;        // items from `whole` on are halves of tiles
  const float *scale_a, *scale_b;  // [M], [G, N]; of fp8

  __device__ __forceinline__ u64 policy() const { return leaves_first(); }

  __device__ __forceinline__ Tile tile_of(int item, int& g, const Place& place) const {
    const bool cut = item >= whole;
    const int number = cut ? whole + (item - whole) / 2 : item;
    while (number >= last[g]) ++g;
    Tile tile;
    tile.group = g;
    tile.start = g ? offs[g - 1] : 0;
    tile.size = offs[g] - tile.start;
    const int all = (tile.size + ROWS - 1) / ROWS;
    const int2 at = serpentine(number - (g ? last[g - 1] : 0), (all + ITEM_PARTS - 1) / ITEM_PARTS, tiles_n);
    int first = at.x * ITEM_PARTS;
    int parts = min(all - first, ITEM_PARTS);
    if (cut) {
      constexpr int half = (ITEM_PARTS + 1) / 2;
      const bool second = (item - whole) % 2;
      first += second ? half : 0;
      parts = second ? max(parts - half, 0) : min(parts, half);
    }
    const int of_first = (parts + CLUSTER_M - 1) / CLUSTER_M;
    tile.parts = place.program_m ? parts - of_first : of_first;
    tile.row = (first + place.program_m * of_first) * ROWS;
    set_columns(tile, at.y, N, place);
    tile.steps = steps;
    return tile;
  }

  __device__ __forceinline__ void load_a(const Tile& tile, int step, const Place& place, u32 to, u32 ready) const {
    const int share = place.program_n * (PARTS * ROWS / CLUSTER_N);
    load_2d(to + share * STEP_BYTES, a, step * BLOCK_K, tile.start + tile.row + share, ready, place.for_row);
  }

  __device__ __forceinline__ void load_b(const Tile& tile, int step, const Place& place, u32 to, u32 ready) const {
    const int k = step * BLOCK_K, matrix = SHARED_B ? 0 : tile.group;
    if (B_IS_NK) {
      const int share = place.program_m * (COLUMNS / CLUSTER_M);
      load_3d(to + share * STEP_BYTES, b, k, tile.column + share, matrix, ready, place.for_column);
    } else {
      const int share = place.program_m * (BLOCK_K / CLUSTER_M);
      for (int box = 0; box < COLUMNS / 64; ++box)
        load_3d(to + box * BOX_BYTES + share * 128, b, tile.column + box * 64, k + share, matrix, ready, place.for_column);
    }
  }

  __device__ __forceinline__ void store(const Tile& tile, int row, int column, u32 from, u64 policy) const {
    store_4d(out, column, BILLION - tile.size + row, tile.start + tile.size, BILLION, from, policy);
  }

  // A thread has sums of two rows and, in every 8 columns, of two. Rows and columns past the group's are not stored.
  __device__ __forceinline__ void scale(const Tile& tile, int row, int column, float* sums) const {
    const float* of_rows = scale_a + tile.start;
    const float* of_columns = scale_b + (long long)tile.group * N;
    const float first = of_rows[min(row, tile.size - 1)], second = of_rows[min(row + 8, tile.size - 1)];
#pragma unroll
    for (int i = 0; i < OUT_COLUMNS / 8; ++i) {
      const int at = min(column + i * 8, N - 2);  // N is a multiple of 8
      const float of_column[2] = {of_columns[at], of_columns[at + 1]};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[i * 4 + j] = sums[i * 4 + j] * first * of_column[j];
        sums[i * 4 + j + 2] = sums[i * 4 + j + 2] * second * of_column[j];
      }
    }
  }
};

extern "C" __global__ void __cluster_dims__(PROGRAMS, 1, 1) __launch_bounds__(128 * (WORKERS + 1), 1)
    cluster_kernel(const __grid_constant__ TensorMap a,    // [M, K], boxes of a program's share of rows and 64 of K
                   const __grid_constant__ TensorMap b,    // [G or 1, N, K] or [G or 1, K, N]; see load_b
                   const __grid_constant__ TensorMap out,  // ragged along M, boxes of [16, 64]
                   void* out_rows,                         // the same memory
                   const float* scale_a,                   // [M]; null but for fp8
                   const float* scale_b,                   // [G, N], likewise
                   const OFFSET* end_offsets,              // [G]
                   u64* counters,                          // [2], of Tickets and of Lockstep
                   int G, int M, int N, int K) {           // M: rows to set to zero past the last group; 0: none
  __shared__ int last[MOST_GROUPS], offs[MOST_GROUPS];
  const Place place = place_of_program();
  const Shared shared = set_up(counters);
  const int tiles_n = (N + ITEM_COLUMNS - 1) / ITEM_COLUMNS;
  for (int g = threadIdx.x; g < G; g += blockDim.x) offs[g] = (int)end_offsets[g];
  __syncthreads();
  sum_up_tiles(G, last, [&](int g) {
    const int size = offs[g] - (g ? offs[g - 1] : 0);
    return (size + ITEM_PARTS * ROWS - 1) / (ITEM_PARTS * ROWS) * tiles_n;
  });
  __syncthreads();
  cluster_sync();

  // The tiles of a short last wave are cut in two if there are clusters for all halves.
  const int tiles = uniform(last[G - 1]), in_last_wave = tiles % place.clusters;
  const bool cut = 2 * in_last_wave <= place.clusters;
  const Forward product = {&a, &b, &out, last, offs, N, (K + BLOCK_K - 1) / BLOCK_K, tiles_n,
                           cut ? tiles + in_last_wave : tiles, cut ? tiles - in_last_wave : tiles, scale_a, scale_b};
  multiply_all(product, place, shared, counters);

  // Rows past the last group belong to none. A row is a multiple of 16 bytes.
  for (long long row = offs[G - 1] + blockIdx.x; row < M; row += gridDim.x)
    for (int i = threadIdx.x; i < N / 8; i += blockDim.x) ((uint4*)out_rows)[row * (N / 8) + i] = make_uint4(0, 0, 0, 0);

  cluster_sync();  // a program's shared memory must outlive what the other one sends to it
}
