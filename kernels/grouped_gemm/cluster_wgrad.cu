// Gradient of a grouped GEMM's weights in 16 bits for Hopper: the kernel of cluster_wgrad.py, which describes it.
//
//     out[g] = x[rows of g]^T @ y[rows of g]        x [M, P]   y [M, Q]   ->   out [G, P, Q]
//
// In the terms of tiles.cuh, x^T is A and y is B, and K are the rows of a group.

struct Gradient {
  const TensorMap *x, *y, *out;
  const int *offs, *order;  // of each group: rows up to its end; the groups, large ones first
  int P, Q;
  int tiles_p, tiles_q;
  int items;

  __device__ __forceinline__ int size_of(int g) const { return offs[g] - (g ? offs[g - 1] : 0); }

  __device__ __forceinline__ u64 policy() const { return stays(); }

  __device__ __forceinline__ Tile tile_of(int item, int&, const Place& place) const {
    const int tiles = tiles_p * tiles_q;
    Tile tile;
    tile.group = order[item / tiles];
    tile.size = size_of(tile.group);
    tile.start = offs[tile.group] - tile.size;
    const int2 at = serpentine(item % tiles, tiles_p, tiles_q);
    tile.row = (at.x * ITEM_PARTS + place.program_m * PARTS) * ROWS;
    tile.parts = max(min((P - tile.row + ROWS - 1) / ROWS, PARTS), 0);
    set_columns(tile, at.y, Q, place);
    tile.steps = max((tile.size + BLOCK_K - 1) / BLOCK_K, 1);  // one of zeros for a group without rows
    tile.in_last_step = max((tile.size - (tile.steps - 1) * BLOCK_K + 15) / 16, 1);
    return tile;
  }

  // Load 64 columns after another, this program's share of the step's rows. Rows past the group's last are zeros.
  __device__ __forceinline__ void load(const TensorMap* map, int boxes, int column, const Tile& tile, int step, int share,
                                       u32 to, u32 ready, unsigned short programs) const {
    const int row = step * BLOCK_K + share;
    for (int box = 0; box < boxes; ++box)
      load_4d(to + box * BOX_BYTES + share * 128, map, column + box * 64, BILLION - tile.size + row,
              tile.start + tile.size, BILLION, ready, programs);
  }

  __device__ __forceinline__ void load_a(const Tile& tile, int step, const Place& place, u32 to, u32 ready) const {
    load(x, PARTS, tile.row, tile, step, place.program_n * (BLOCK_K / CLUSTER_N), to, ready, place.for_row);
  }

  __device__ __forceinline__ void load_b(const Tile& tile, int step, const Place& place, u32 to, u32 ready) const {
    load(y, COLUMNS / 64, tile.column, tile, step, place.program_m * (BLOCK_K / CLUSTER_M), to, ready, place.for_column);
  }

  __device__ __forceinline__ void store(const Tile& tile, int row, int column, u32 from, u64 policy) const {
    store_3d(out, column, row, tile.group, from, policy);
  }
};

extern "C" __global__ void __cluster_dims__(PROGRAMS, 1, 1) __launch_bounds__(128 * (WORKERS + 1), 1)
    cluster_wgrad_kernel(const __grid_constant__ TensorMap x,    // [M, P], ragged along M, boxes of a share of 64 x 64
                         const __grid_constant__ TensorMap y,    // [M, Q], likewise
                         const __grid_constant__ TensorMap out,  // [G, P, Q], boxes of [16, 64]
                         const OFFSET* end_offsets,              // [G]
                         u64* counters,                          // [2], of Tickets and of Lockstep
                         int G, int P, int Q) {
  __shared__ int offs[MOST_GROUPS], order[MOST_GROUPS];
  const Place place = place_of_program();
  const Shared shared = set_up(counters);
  for (int g = threadIdx.x; g < G; g += blockDim.x) offs[g] = (int)end_offsets[g];
  __syncthreads();
  order_by_size(G, offs, order);
  __syncthreads();
  cluster_sync();
  const int tiles_p = (P + ITEM_PARTS * ROWS - 1) / (ITEM_PARTS * ROWS);
  const int tiles_q = (Q + ITEM_COLUMNS - 1) / ITEM_COLUMNS;
  const Gradient product = {&x, &y, &out, offs, order, P, Q, tiles_p, tiles_q, G * tiles_p * tiles_q};
  multiply_all(product, place, shared, counters);
  __syncthreads();
  cluster_sync();  // a program's shared memory must outlive what the other one sends to it
}
