/* The kernels of packed products against plain C in double precision, as a program of its own: scripts/check_processors.sh runs
 * it for processors that are not here. All widths, dtypes and kinds of tiles; products, decoded rows, sums by code. */
#include "../edkm_cli/runtime/codes.h"
#include "../edkm_cli/runtime/packed.h"

#include <stdio.h>
#include <stdlib.h>

int edkm_lut_linear_level(void);
int edkm_packed_rows(
    const Packed *packed, const int64_t *ids, int64_t first, int64_t count, int64_t from, int64_t end, int64_t dtype, void *out
);
void edkm_sum_by_code(const Packed *packed, const float *values, int64_t first, int64_t count, float *sums);

static uint32_t state = 1;
static uint32_t draw(void) { return state = state * 1664525u + 1013904223u, state >> 8; }
static float number(void) { return (float)draw() / (1 << 23) - 1; }

static float rounded(float x, int64_t dtype) { /* to what the dtype holds, by cutting: any number of the dtype will do */
    union { float f; uint32_t u; } bits = {x};
    bits.u &= dtype == BFLOAT16 ? 0xffff0000u : dtype == FLOAT16 ? 0xffffe000u : 0xffffffffu;
    return dtype == FLOAT16 && fabsf(bits.f) < 6.2e-5f ? 0 : bits.f;
}

static void keep_number(float x, int64_t dtype, void *to, int64_t at) {
    union { float f; uint32_t u; } bits = {x};
    if (dtype == FLOAT32) ((float *)to)[at] = x;
    else if (dtype == BFLOAT16) ((uint16_t *)to)[at] = (uint16_t)(bits.u >> 16);
    else ((uint16_t *)to)[at] = (uint16_t)((bits.u >> 16 & 0x8000) | (x ? ((bits.u & 0x7fffffffu) - 0x38000000u) >> 13 : 0));
}

static float value(const void *from, int64_t dtype, int64_t at) {
    Matrix matrix = {from, dtype, 0};
    float x;
    load_run(&matrix, at, 1, &x);
    return x;
}

/* Not 0 where a result is further from the exact one than rounding explains. */
static int check(int bits, int levels, int64_t rows, int64_t columns, int64_t tile_rows, int64_t tile_columns, int64_t dtype) {
    int64_t in_row = (columns * bits + 7) / 8, k = 1 << bits, across = columns / tile_columns;
    int64_t entries = levels ? rows : rows / tile_rows * across * k, most = 70;
    uint8_t *indices = calloc((size_t)(rows * in_row), 1);
    float *lut = malloc((size_t)entries * 4), *w = malloc((size_t)(rows * columns) * 4), *decoded = malloc((size_t)(rows * columns) * 4);
    float *x = malloc((size_t)(most * columns) * 4), *sums = malloc((size_t)(rows * across * k) * 4);
    void *x_kept = malloc((size_t)(most * columns) * 4), *out = malloc((size_t)(most * rows) * 4);
    int failed = 0;
    for (int64_t i = 0; i < entries; i++) lut[i] = number();
    for (int64_t i = 0; i < most * columns; i++) keep_number(x[i] = rounded(number(), dtype), dtype, x_kept, i);
    for (int64_t i = 0; i < rows * columns; i++) {
        int64_t row = i / columns, column = i % columns, code = draw() % k, bit = column * bits;
        uint8_t *at = indices + row * in_row + bit / 8;
        at[0] |= (uint8_t)(code << bit % 8);
        if (bit % 8 + bits > 8) at[1] |= (uint8_t)(code >> (8 - bit % 8));
        w[i] = levels ? lut[row] * (float)(code - k / 2)
                      : lut[(row / tile_rows * across + column / tile_columns) * k + code];
    }
    Packed *packed = calloc(1, sizeof *packed + sizeof(Part));
    Part part = {indices, lut, NULL, rows, tile_rows, tile_columns, FLOAT32, 0};
    packed->columns = columns, packed->bits = bits, packed->levels = levels, packed->count = 1, packed->parts[0] = part;
    const int64_t all_tokens[] = {1, 2, 3, 4, 7, 12, 13, 16, 33, 70};
    double unit = dtype == FLOAT32 ? 6e-8 : dtype == BFLOAT16 ? 3.91e-3 : 4.9e-4, of_weights = dtype == BFLOAT16 ? 3.91e-3 : 1e-6;
    for (size_t t = 0; t < sizeof all_tokens / sizeof *all_tokens; t++) {
        int64_t tokens = all_tokens[t];
        failed |= edkm_lut_linear(packed, x_kept, dtype, columns, tokens, &out, 0);
        for (int64_t n = 0; n < tokens; n++)
            for (int64_t r = 0; r < rows; r++) {
                double exact = 0, magnitude = 0;
                for (int64_t c = 0; c < columns; c++) {
                    double one = (double)x[n * columns + c] * w[r * columns + c];
                    exact += one, magnitude += fabs(one);
                }
                double error = fabs(value(out, dtype, n * rows + r) - exact);
                failed |= !(error <= unit * fabs(exact) + of_weights * magnitude + 1e-7);
            }
    }
    failed |= edkm_packed_rows(packed, NULL, 0, rows, 0, columns, FLOAT32, decoded);
    failed |= memcmp(decoded, w, (size_t)(rows * columns) * 4) != 0;
    if (!levels) {
        edkm_sum_by_code(packed, w, 0, rows, sums); /* of the weights themselves: an entry as often as it was chosen */
        for (int64_t i = 0; i < rows * across * k; i++) {
            double exact = 0;
            int64_t row = i / (across * k), tile = i / k % across;
            for (int64_t c = tile * tile_columns; c < (tile + 1) * tile_columns; c++)
                if (code_at(indices + row * in_row, c, bits) == i % k) exact += w[row * columns + c];
            failed |= !(fabs(sums[i] - exact) <= 1e-5 * (1 + fabs(exact)));
        }
    }
    if (failed) printf("wrong: %d bits, levels %d, %ldx%ld, dtype %ld\n", bits, levels, (long)rows, (long)columns, (long)dtype);
    free(indices), free(lut), free(w), free(decoded), free(x), free(sums), free(x_kept), free(out), free(packed);
    return failed;
}

int main(void) {
    const int64_t shapes[][4] = {{24, 200, 1, 200}, {37, 97, 1, 97}, {1, 1, 1, 1},      {18, 129, 2, 129}, {33, 64, 33, 64},
                                 {32, 192, 8, 64},  {21, 192, 3, 64}, {20, 144, 4, 48}, {6, 120, 2, 24},   {17, 45, 1, 9},
                                 {16, 1344, 1, 1344}};
    int failed = 0, checks = 0;
    for (int bits = 1; bits <= 8; bits++)
        for (int64_t dtype = FLOAT32; dtype <= FLOAT16; dtype++) {
            for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++, checks++)
                failed += check(bits, 0, shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3], dtype);
            for (int wide = 0; wide < 2 && bits > 1; wide++, checks++)
                failed += check(bits, 1, 19, wide ? 200 : 45, 1, wide ? 200 : 45, dtype);
        }
    printf("level %d: %d matrices, %d wrong\n", edkm_lut_linear_level(), checks, failed);
    return failed != 0;
}
