/* Packed matrices as the kernels read them; Python lays these structs out (lut_linear_c.py). */
#ifndef EDKM_PACKED
#define EDKM_PACKED

#include <stdint.h>

/* Matrices in one product; dimensions of x; dtypes of x: float32, bfloat16, float16, by these numbers. */
enum { MOST_PARTS = 8, MOST_DIMENSIONS = 8, DTYPES = 3 };

/* One packed matrix and what is computed with it. `lut`: (groups, 2^bits) entries, or one float32 scale a row. */
typedef struct {
    const uint8_t *indices;
    const void *lut, *bias;
    int64_t rows, tile_rows, tile_columns, lut_dtype, bias_dtype;
} Part;

/* What callers prepare once: matrices with equal columns, bits and kind; `levels`: their luts are row scales. */
typedef struct {
    int64_t columns, bits, levels, count;
    Part parts[];
} Packed;

/* One code, wherever it lies. */
static inline int code_at(const uint8_t *row, int64_t column, int bits) {
    int64_t bit = column * bits;
    int code = row[bit / 8] >> (bit % 8);
    if (bit % 8 + bits > 8) code |= row[bit / 8 + 1] << (8 - bit % 8);
    return code & ((1 << bits) - 1);
}

/* tensors.c: x and outs[p] are PyTorch's tensors. 1 where memory is short, -1 where this is not the way. */
int edkm_product(void *x, const Packed *packed, const int64_t most[DTYPES], void *outs[MOST_PARTS]);

/* lut_linear.c */
int edkm_lut_linear(
    const Packed *packed, const void *x, int64_t dtype, int64_t x_row, int64_t tokens, void *const *outs, int64_t out_row
);

#endif
