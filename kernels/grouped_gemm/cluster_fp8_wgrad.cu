// Gradient of a grouped GEMM's weights from fp8 for Hopper: the kernel of cluster_fp8_wgrad.py, which describes it.
//
//     out[g] = sum over g's blocks of rows: scale_x[block] scale_y[block] x[:, block] @ y[:, block]^T
//
//     x [P, R]   y [Q, R]   scale_x [R/128, P]   scale_y [R/128, Q]   ->   out [G, P, Q]
//
// In the terms of tiles.cuh, x is A and y is B, and K are the rows of a group, in whole blocks of 128.

struct Gradient {
  const TensorMap *x, *y, *out;
  const float *scale_x, *scale_y;
  const float* main_grad;   // [G, P, Q], added; may be null. With STORES_SUMS, as is:
  float* out_sums;          // [G, P, Q], may be main_grad
  const int *last, *order;  // of each group: blocks up to its end; the groups, large ones first
  int P, Q, blocks;         // that exist
  int tiles_p, tiles_q;
  int items;

  __device__ __forceinline__ u64 policy() const { return stays(); }

  __device__ __forceinline__ Tile tile_of(int item, int&, const Place& place) const {
    const int tiles = tiles_p * tiles_q;
    Tile tile;
    tile.group = order[item / tiles];
    tile.start = tile.group ? last[tile.group - 1] : 0;
    tile.size = last[tile.group] - tile.start;
    const int2 at = serpentine(item % tiles, tiles_p, tiles_q);
    tile.row = (at.x * ITEM_PARTS + place.program_m * PARTS) * ROWS;
    tile.parts = max(min((P - tile.row + ROWS - 1) / ROWS, PARTS), 0);
    set_columns(tile, at.y, Q, place);
    tile.steps = max(tile.size, 1);
    if (!tile.size) tile.start = blocks;  // past the end: zeros
    tile.in_last_step = 0;
    return tile;
  }

  __device__ __forceinline__ void load_a(const Tile& tile, int step, const Place& place, u32 to, u32 ready) const {
    const int share = place.program_n * (PARTS * ROWS / CLUSTER_N);
    load_2d(to + share * STEP_BYTES, x, (tile.start + step) * BLOCK_K, tile.row + share, ready, place.for_row);
  }

  __device__ __forceinline__ void load_b(const Tile& tile, int step, const Place& place, u32 to, u32 ready) const {
    const int share = place.program_m * (COLUMNS / CLUSTER_M);
    load_2d(to + share * STEP_BYTES, y, (tile.start + step) * BLOCK_K, tile.column + share, ready, place.for_column);
  }

  __device__ __forceinline__ int of_rows(const Tile& tile) const { return max(min(P - tile.row, PARTS * ROWS), 0) * 4; }

  __device__ __forceinline__ int of_columns(const Tile& tile) const { return max(min(Q - tile.column, COLUMNS), 0) * 4; }

  __device__ __forceinline__ bool needs_scales(const Tile& tile) const { return tile.size && tile.parts && tile.columns; }

  __device__ __forceinline__ int scale_bytes(const Tile& tile) const {
    return needs_scales(tile) ? of_rows(tile) + of_columns(tile) : 0;
  }

  __device__ __forceinline__ void load_scales(const Tile& tile, int step, u32 to, u32 ready) const {
    if (!needs_scales(tile)) return;
    const long long block = tile.start + step;
    copy(to, scale_x + block * P + tile.row, of_rows(tile), ready);
    copy(to + PARTS * ROWS * 4, scale_y + block * Q + tile.column, of_columns(tile), ready);
  }

  __device__ __forceinline__ void store(const Tile& tile, int row, int column, u32 from, u64 policy) const {
    store_3d(out, column, row, tile.group, from, policy);
  }

  // A thread has sums of two rows and, in every 8 columns, of two, from `column` of the tile on. What they are added to is
  // loaded for many columns at once: a load must wait for the stores before it, as it may have their address.
  __device__ __forceinline__ void store_sums(const Tile& tile, int row, int column, const float* sums) const {
    const int columns = min(tile.columns, Q - tile.column);
    const long long at = ((long long)tile.group * P + row) * Q + tile.column + column;
#pragma unroll
    for (int from = 0; from < COLUMNS; from += 64) {
      float2 more[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int half = i % 2 * 8, inside = from + i / 2 * 8;
        more[i] = make_float2(0, 0);
        if (main_grad && row + half < P && inside < columns) more[i] = *(const float2*)(main_grad + at + half * Q + inside);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int half = i % 2 * 8, inside = from + i / 2 * 8;
        const float* sum = sums + inside / 2 + i % 2 * 2;
        if (row + half < P && inside < columns)
          *(float2*)(out_sums + at + half * Q + inside) = make_float2(sum[0] + more[i].x, sum[1] + more[i].y);
      }
    }
  }
};

extern "C" __global__ void __cluster_dims__(PROGRAMS, 1, 1) __launch_bounds__(128 * (WORKERS + 1), 1)
    cluster_fp8_wgrad_kernel(const __grid_constant__ TensorMap x,    // [P, R], boxes of a share of rows and 128 of R
                             const __grid_constant__ TensorMap y,    // [Q, R], likewise
                             const __grid_constant__ TensorMap out,  // [G, P, Q], boxes of [16, 64]
                             const float* scale_x, const float* scale_y,
                             const float* main_grad,                 // [G, P, Q], or null
                             float* out_sums,                        // [G, P, Q] with STORES_SUMS, instead of `out`
                             const OFFSET* end_offsets,              // [G]
                             u64* counters,                          // [2], of Tickets and of Lockstep
                             int G, int P, int Q, int blocks) {
  __shared__ int last[MOST_GROUPS], order[MOST_GROUPS];
  const Place place = place_of_program();
  const Shared shared = set_up(counters);
  sum_up_tiles(G, last, [&](int g) {
    const int size = (int)end_offsets[g] - (g ? (int)end_offsets[g - 1] : 0);
    return (size + BLOCK_K - 1) / BLOCK_K;
  });
  __syncthreads();
  order_by_size(G, last, order);
  __syncthreads();
  cluster_sync();
  const int tiles_p = (P + ITEM_PARTS * ROWS - 1) / (ITEM_PARTS * ROWS);
  const int tiles_q = (Q + ITEM_COLUMNS - 1) / ITEM_COLUMNS;
  const Gradient product = {&x, &y, &out, scale_x, scale_y, main_grad, out_sums, last, order, P, Q, blocks, tiles_p, tiles_q,
                            G * tiles_p * tiles_q};
  multiply_all(product, place, shared, counters);
  __syncthreads();
  cluster_sync();  // a program's shared memory must outlive what the other one sends to it
}
