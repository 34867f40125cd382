/* The C kernels against plain C, as a program of its own: scripts/check_processors.sh runs it for processors that are not here.
 * Of packed matrices all widths, dtypes and kinds of tiles: products, decoded rows, sums by code. Of clustering the nearest
 * entries and what is summed by them, the rounding of columns, the exact k-means. Of writing the attention and the norm. */
#include "../edkm_cli/runtime/decoder_step.c"

#include <stdio.h>
#include <stdlib.h>

int edkm_lut_linear_level(void);
int edkm_packed_rows(
    const Packed *packed, const int64_t *ids, int64_t first, int64_t count, int64_t from, int64_t end, int64_t dtype, void *out
);
void edkm_sum_by_code(const Packed *packed, const float *values, int64_t first, int64_t count, float *sums);

void edkm_nearest(const Layout *layout, const Matrix *w, const float *c, uint8_t *indices, int64_t first, int64_t last);
void edkm_snap(
    const Layout *layout, const Matrix *w, const float *c, const Matrix *out, uint8_t *flawed, int64_t first, int64_t last
);
void edkm_sum_by_entry(
    const Layout *layout, const Matrix *w, const float *c, const Matrix *grad, double *sums, int64_t first, int64_t last
);
void edkm_round_columns(
    float *block, float *errors, const float *luts, const int64_t *tiles, const float *factor, int64_t columns, int64_t rows,
    int64_t k, int64_t first, int64_t last
);
int edkm_kmeans(
    const float *values, const float *importance, int64_t n, const int64_t *ks, int64_t count, float *centroids,
    int64_t first, int64_t last
);

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
    float x;
    load_run(from, dtype, at, 1, &x);
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
            failed |= !(fabs(sums[i] - exact) <= 2e-6 * (1 + fabs(exact)));
        }
    }
    if (failed) printf("wrong: %d bits, levels %d, %ldx%ld, dtype %ld\n", bits, levels, (long)rows, (long)columns, (long)dtype);
    free(indices), free(lut), free(w), free(decoded), free(x), free(sums), free(x_kept), free(out), free(packed);
    return failed;
}

static int64_t nearest_of(float w, const float *c, int64_t k) {
    int64_t best = 0;
    for (int64_t j = 1; j < k; j++)
        if (fabsf(w - c[j]) < fabsf(w - c[best])) best = j;
    return best;
}

enum { MOST = 37 * 192 };

static int check_entries(int64_t rows, int64_t columns, int64_t tile_rows, int64_t tile_columns, int64_t k) {
    static float w[MOST], g[MOST], snapped[MOST], c[MOST * 16];
    static double sums[MOST * 16], exact[MOST * 16];
    static uint8_t indices[MOST], flawed[MOST];
    int64_t across = columns / tile_columns, groups = rows / tile_rows * across;
    Layout layout = {columns, tile_rows, tile_columns, 1, k};
    Matrix weight = {w, FLOAT32, 0}, grad = {g, FLOAT32, 0}, out = {snapped, FLOAT32, 0};
    int failed = 0;
    memset(exact, 0, sizeof exact), memset(flawed, 0, sizeof flawed);
    for (int64_t i = 0; i < rows * columns; i++) w[i] = number(), g[i] = number();
    for (int64_t i = 0; i < groups * k; i++) c[i] = number();
    edkm_nearest(&layout, &weight, c, indices, 0, rows / tile_rows);
    edkm_snap(&layout, &weight, c, &out, flawed, 0, rows / tile_rows);
    edkm_sum_by_entry(&layout, &weight, c, &grad, sums, 0, rows / tile_rows);
    for (int64_t i = 0; i < rows * columns; i++) {
        int64_t group = i / columns / tile_rows * across + i % columns / tile_columns, best = nearest_of(w[i], c + group * k, k);
        failed |= indices[i] != best || snapped[i] != c[group * k + best];
        exact[group * k + best] += g[i];
    }
    for (int64_t i = 0; i < groups * k; i++) failed |= !(fabs(sums[i] - exact[i]) <= 1e-4);
    for (int64_t i = 0; i < rows; i++) failed |= flawed[i];
    if (failed) printf("wrong: entries, %ldx%ld, %ld\n", (long)rows, (long)columns, (long)k);
    return failed;
}

static int check_columns(int64_t rows, int64_t columns, int64_t k) {
    static float block[MOST], errors[MOST], luts[16 * 192], factor[MOST];
    static double w[MOST];
    int64_t tiles[128];
    int failed = 0;
    for (int64_t i = 0; i < columns * rows; i++) w[i] = block[i] = number();
    for (int64_t i = 0; i < columns * columns; i++) factor[i] = number() / 16;
    for (int64_t i = 0; i < 2 * k * rows; i++) luts[i] = (float)(i / rows % k) / (float)k - 0.5f; /* two tiles, ascending */
    for (int64_t j = 0; j < columns; j++) tiles[j] = j * 2 / columns;
    edkm_round_columns(block, errors, luts, tiles, factor, columns, rows, k, 0, (rows + 15) / 16);
    for (int64_t j = 0; j < columns; j++) /* with the errors that were chosen: a tie may fall either way */
        for (int64_t r = 0; r < rows; r++) {
            double error = errors[j * rows + r], entry = w[j * rows + r] - error, least = 1e9;
            for (int64_t i = 0; i < k; i++) least = fmin(least, fabs(w[j * rows + r] - luts[(tiles[j] * k + i) * rows + r]));
            failed |= !(fabs(fabs(error) - least) <= 1e-5) || !(fabs(entry - nearbyint(entry * k) / k) <= 1e-5);
            for (int64_t t = j + 1; t < columns; t++) w[t * rows + r] -= factor[j * columns + t] * error;
        }
    if (failed) printf("wrong: columns, %ldx%ld, %ld\n", (long)rows, (long)columns, (long)k);
    return failed;
}

static int by_size(const void *a, const void *b) { return (*(float *)a > *(float *)b) - (*(float *)a < *(float *)b); }

static int check_kmeans(int64_t n, int64_t k) { /* what is left of the squares, against all splits of the sorted values */
    static float values[300], c[16];
    static double least[17][301];
    double left = 0;
    for (int64_t i = 0; i < n; i++) values[i] = number();
    int failed = edkm_kmeans(values, NULL, n, &k, 1, c, 0, 1);
    for (int64_t i = 0; i < n; i++) left += pow(values[i] - c[nearest_of(values[i], c, k)], 2);
    qsort(values, (size_t)n, sizeof *values, by_size);
    for (int64_t q = 0; q <= k; q++)
        for (int64_t end = 0; end <= n; end++) {
            double s1 = 0, s2 = 0, best = end ? 1e9 : 0;
            for (int64_t from = end - 1; q && from >= 0; from--) {
                s1 += values[from], s2 += (double)values[from] * values[from];
                best = fmin(best, least[q - 1][from] + s2 - s1 * s1 / (double)(end - from));
            }
            least[q][end] = best;
        }
    failed |= !(fabs(left - least[k][n]) <= 1e-4 * left);
    if (failed) printf("wrong: k-means of %ld, %ld\n", (long)n, (long)k);
    return failed;
}

static int check_clustering(void) {
    int failed = 0;
    for (int64_t k = 2; k <= 16; k *= 2) {
        failed |= check_entries(37, 97, 1, 97, k) | check_entries(32, 192, 8, 64, k) | check_entries(37, 192, 37, 192, k);
        failed |= check_columns(37, 64, k) | check_columns(16, 128 / 3, k) | check_kmeans(300, k) | check_kmeans(45, k);
    }
    return failed;
}

static int check_writing(int64_t head_size, int64_t tokens, int64_t dtype) {
    enum { HEADS = 14, KV_HEADS = 2, ROOM = 70 };
    static char q[HEADS * 256 * 4], keys[KV_HEADS * ROOM * 256 * 4], values[sizeof keys], out[sizeof q], normed[sizeof q];
    static float scores[HEADS * (ROOM + 16)];
    Step step = {.heads = HEADS, .kv_heads = KV_HEADS, .head_size = head_size, .dtype = dtype, .scale = 0.3};
    Layer layer = {.keys = keys, .values = values, .head_stride = ROOM * head_size};
    Attention attention = {&step, &layer, q, out, tokens, scores, (tokens + LANES - 1) / LANES * LANES};
    int64_t width = HEADS * head_size;
    double unit = dtype == FLOAT32 ? 1e-6 : dtype == BFLOAT16 ? 3.91e-3 : 4.9e-4, squares = 0;
    int failed = 0;
    for (int64_t i = 0; i < width; i++) keep_number(rounded(number(), dtype), dtype, q, i), squares += pow(value(q, dtype, i), 2);
    for (int64_t i = 0; i < KV_HEADS * ROOM * head_size; i++) {
        keep_number(rounded(number(), dtype), dtype, keys, i);
        keep_number(rounded(number(), dtype), dtype, values, i);
    }
    ATTEND[dtype](&attention, 0, 5), ATTEND[dtype](&attention, 5, HEADS); /* 4, 1; 2, 4, 3 heads together */
    for (int64_t h = 0; h < HEADS; h++) {
        int64_t base = h / (HEADS / KV_HEADS) * layer.head_stride;
        double shares[ROOM], mass = 0;
        for (int64_t t = 0; t < tokens; t++) {
            double dot = 0;
            for (int64_t i = 0; i < head_size; i++)
                dot += (double)value(q, dtype, h * head_size + i) * value(keys, dtype, base + t * head_size + i);
            mass += shares[t] = exp(dot * step.scale);
        }
        for (int64_t i = 0; i < head_size; i++) {
            double exact = 0;
            for (int64_t t = 0; t < tokens; t++) exact += shares[t] / mass * value(values, dtype, base + t * head_size + i);
            failed |= !(fabs(value(out, dtype, h * head_size + i) - exact) <= unit * fabs(exact) + 1e-5);
        }
    }
    normalize(q, dtype, values, 1e-5, dtype, width, normed);
    for (int64_t i = 0; i < width; i++) {
        double exact = value(q, dtype, i) / sqrt(squares / (double)width + 1e-5) * value(values, dtype, i);
        failed |= !(fabs(value(normed, dtype, i) - exact) <= unit * fabs(exact) + 1e-6);
    }
    if (failed) printf("wrong: attention of %ld, %ld tokens, dtype %ld\n", (long)head_size, (long)tokens, (long)dtype);
    return failed;
}

int main(void) {
    const int64_t shapes[][4] = {{24, 200, 1, 200}, {37, 97, 1, 97}, {1, 1, 1, 1},      {18, 129, 2, 129}, {33, 64, 33, 64},
                                 {32, 192, 8, 64},  {21, 192, 3, 64}, {20, 144, 4, 48}, {6, 120, 2, 24},   {17, 45, 1, 9},
                                 {16, 1344, 1, 1344}, {2, 4096, 1, 256}, {2, 11008, 1, 64},
                                 {21, 416, 3, 32},  {5, 208, 1, 16}};
    const int64_t head_sizes[] = {32, 64, 96, 128, 256}, lengths[] = {1, 33, 70};
    int failed = check_clustering(), checks = 0;
    for (int64_t dtype = FLOAT32; dtype <= FLOAT16; dtype++)
        for (int s = 0; s < 5; s++)
            for (int n = 0; n < 3; n++) failed += check_writing(head_sizes[s], lengths[n], dtype);
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
