/* What table_torch.py does to every weight of a 16-bit matrix: a bit pattern indexes a table of 65,536 entries. */
#include "lanes.h"

void edkm_count_patterns(const uint16_t *bits, int64_t *counts, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) counts[bits[i]]++;
}

void edkm_sum_by_pattern(const uint16_t *bits, const Matrix *grad, double *sums, int64_t first, int64_t last) {
    float g[BLOCK] __attribute__((aligned(64)));
    for (int64_t at = first; at < last; at += BLOCK) {
        int64_t count = smaller(BLOCK, last - at);
        load_run(grad->data, grad->dtype, at, count, g);
        for (int64_t i = 0; i < count; i++) sums[bits[at + i]] += g[i];
    }
}

void edkm_gather(const uint16_t *bits, const void *table, int64_t entry_bytes, void *out, int64_t first, int64_t last) {
    if (entry_bytes == 2)
        for (int64_t i = first; i < last; i++) ((uint16_t *)out)[i] = ((const uint16_t *)table)[bits[i]];
    else
        for (int64_t i = first; i < last; i++) ((float *)out)[i] = ((const float *)table)[bits[i]];
}

/* out = offset[pattern] + f * table_f[pattern] + g * table_g[pattern], of two factors that may be missing. The three
 * tables are one of rows of four: one cache line. */
void edkm_blend(
    const uint16_t *bits, const Matrix *f_of, const Matrix *g_of, const float *rows, const Matrix *out, int64_t first,
    int64_t last
) {
    float f[BLOCK] __attribute__((aligned(64))) = {0}, g[BLOCK] __attribute__((aligned(64))) = {0};
    Layout flat = {0, 1, 1, 1, 1};
    for (int64_t at = first; at < last; at += BLOCK) {
        int64_t count = smaller(BLOCK, last - at);
        if (f_of->data) load_run(f_of->data, f_of->dtype, at, count, f);
        if (g_of->data) load_run(g_of->data, g_of->dtype, at, count, g);
        for (int64_t i = 0; i < count; i++) {
            const float *row = rows + 4 * bits[at + i];
            f[i] = f[i] * row[1] + g[i] * row[2] + row[0];
        }
        Rect run = {0, 1, at, count};
        store((void *)out->data, out->dtype, &flat, run, f);
    }
}
