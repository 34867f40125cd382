/* Sums of a symmetric matrix by the codes of its rows and columns: passes_torch.py.
 *
 * For each row of codes, rows of H are added up by code, 64 columns at a time, then the columns of these sums. Of H only
 * the blocks on the diagonal and below are read. Some rows share what is read, a block of which stays in the first cache.
 */
#include <stdlib.h>

#include "lanes.h"

enum { ACROSS = 64, VECTORS = ACROSS / LANES, SUMS = 1 << 17 };

/* products[code of j][a] of a row from sums (k, ACROSS), which are zeroed; a block on the diagonal has both halves. */
static void add_columns(double *products, float *sums, const uint8_t *code, int64_t across, int64_t k, double share) {
    for (int64_t j = 0; j < across; j++) {
        double *of = products + code[j] * k;
        for (int64_t a = 0; a < k; a++) of[a] += share * sums[a * ACROSS + j];
    }
    memset(sums, 0, k * ACROSS * sizeof(float));
}

/* indices (rows, columns); hessian (columns, columns); products (rows, k, k) float64, zero at first; a unit is a row.
 * Returns 0, or 1 where there is no memory for the sums. */
int edkm_sum_by_code(
    const uint8_t *indices, const float *hessian, double *products, int64_t columns, int64_t k, int64_t first, int64_t last
) {
    const int64_t band = SUMS / (k * ACROSS) > 0 ? SUMS / (k * ACROSS) : 1;
    float *block = aligned_alloc(64, (ACROSS + band * k) * ACROSS * sizeof(float));
    if (!block) return 1;
    float *sums = memset(block + ACROSS * ACROSS, 0, band * k * ACROSS * sizeof(float));
    for (int64_t top = first; top < last; top += band) {
        const int64_t rows = smaller(band, last - top);
        for (int64_t left = 0; left < columns; left += ACROSS) {
            const int64_t across = smaller(ACROSS, columns - left);
            for (int64_t from = left; from < columns; from += ACROSS) {
                const int64_t down = smaller(ACROSS, columns - from);
                if (across < ACROSS) memset(block, 0, ACROSS * ACROSS * sizeof(float));
                for (int64_t i = 0; i < down; i++)
                    memcpy(block + i * ACROSS, hessian + (from + i) * columns + left, across * sizeof(float));
                for (int64_t r = 0; r < rows; r++) {
                    const uint8_t *code = indices + (top + r) * columns + from;
                    vf *of_row = (vf *)(sums + r * k * ACROSS);
                    for (int64_t i = 0; i < down; i++) {
                        vf *sum = of_row + code[i] * VECTORS;
#pragma GCC unroll 8
                        for (int v = 0; v < VECTORS; v++) sum[v] += ((const vf *)(block + i * ACROSS))[v];
                    }
                }
                if (from > left && from + ACROSS < columns) continue; /* the diagonal block counts once, the sum of others twice */
                for (int64_t r = 0; r < rows; r++)
                    add_columns(
                        products + (top + r) * k * k, sums + r * k * ACROSS, indices + (top + r) * columns + left, across, k,
                        from > left ? 1.0 : 0.5
                    );
            }
        }
    }
    for (double *of = products + first * k * k; of < products + last * k * k; of += k * k)
        for (int64_t a = 0; a < k; a++)
            for (int64_t b = 0; b <= a; b++) of[a * k + b] = of[b * k + a] = of[a * k + b] + of[b * k + a];
    free(block);
    return 0;
}
