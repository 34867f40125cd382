/* Choices of entries improved one column after the other: descent_torch.py.
 *
 * Rows are independent. After the first sweep few weights change, and one that stays costs only the search among its
 * entries; one that changes passes its change on to the whole row. To columns beside its own that is put off until some
 * rows have done theirs, so that what they need of H is read once for all of them. Each error still gets the changes one
 * by one in the order of the columns.
 */
#include <stdlib.h>

#include "lanes.h"

enum { BESIDE = 128, ROWS = 64, VECTORS = 4 }; /* columns worked on at a time, rows that share H, vectors in registers */

typedef struct {
    int64_t count;
    int32_t columns[BESIDE];
    float by[BESIDE];
} Changes;

/* errors[i] for i in [from, to), all changes added in their order. */
static void pass_on(float *errors, const Changes *changes, const float *hessian, int64_t columns, int64_t from, int64_t to) {
    int64_t i = from;
    for (; i + VECTORS * LANES <= to; i += VECTORS * LANES) {
        vf sums[VECTORS];
        for (int v = 0; v < VECTORS; v++) sums[v] = *(const vfu *)(errors + i + v * LANES);
        for (int64_t c = 0; c < changes->count; c++) {
            const float *h = hessian + changes->columns[c] * columns + i;
            const vf by = splat(changes->by[c]);
            for (int v = 0; v < VECTORS; v++) sums[v] += by * *(const vfu *)(h + v * LANES);
        }
        for (int v = 0; v < VECTORS; v++) *(vfu *)(errors + i + v * LANES) = sums[v];
    }
    for (; i < to; i++)
        for (int64_t c = 0; c < changes->count; c++)
            errors[i] += changes->by[c] * hessian[changes->columns[c] * columns + i];
}

/* One row's columns [start, end), each change passed on inside of them and noted. */
static void choose_entries(
    uint8_t *chosen, float *errors, const float *tables, const float *hessian, int64_t columns, int64_t width, int64_t k,
    int64_t start, int64_t end, Changes *changes
) {
    changes->count = 0;
    for (int64_t j = start; j < end; j++) {
        const float *entries = tables + j / width * k, *h = hessian + j * columns;
        const float now = entries[chosen[j]], best = now - errors[j] / h[j];
        int64_t nearest = 0;
        float distance = fabsf(entries[0] - best);
        for (int64_t i = 1; i < k; i++) {
            const float other = fabsf(entries[i] - best);
            nearest = other < distance ? i : nearest;
            distance = other < distance ? other : distance;
        }
        if (nearest == chosen[j]) continue;
        const float change = entries[nearest] - now;
        for (int64_t i = start; i < end; i++) errors[i] += change * h[i];
        chosen[j] = (uint8_t)nearest;
        changes->columns[changes->count] = (int32_t)j;
        changes->by[changes->count++] = change;
    }
}

/* indices (rows, columns); errors (rows, columns); luts (rows, tiles, k); hessian (columns, columns); a unit is a row.
 * Returns 0, or 1 where there is no memory for the changes. */
int edkm_descend(
    uint8_t *indices, float *errors, const float *luts, const float *hessian, int64_t columns, int64_t tiles, int64_t k,
    int64_t sweeps, int64_t first, int64_t last
) {
    const int64_t width = columns / tiles;
    Changes *changes = malloc(ROWS * sizeof(Changes));
    if (!changes) return 1;
    for (int64_t top = first; top < last; top += ROWS) {
        int64_t rows[ROWS], count = 0;
        for (int64_t row = top; row < smaller(top + ROWS, last); row++) rows[count++] = row;
        for (int64_t sweep = 0; sweep < sweeps && count; sweep++) {
            uint8_t changed[ROWS] = {0};
            for (int64_t start = 0; start < columns; start += BESIDE) {
                const int64_t end = smaller(start + BESIDE, columns);
                for (int64_t r = 0; r < count; r++) {
                    choose_entries(
                        indices + rows[r] * columns, errors + rows[r] * columns, luts + rows[r] * tiles * k, hessian,
                        columns, width, k, start, end, changes + r
                    );
                    changed[r] |= changes[r].count > 0;
                }
                for (int64_t from = 0; from < columns; from += VECTORS * LANES) {
                    const int64_t to = smaller(from + VECTORS * LANES, columns);
                    for (int64_t r = 0; r < count; r++) {
                        float *row = errors + rows[r] * columns;
                        if (changes[r].count == 0) continue;
                        if (from < start) pass_on(row, changes + r, hessian, columns, from, smaller(to, start));
                        if (to > end) pass_on(row, changes + r, hessian, columns, from > end ? from : end, to);
                    }
                }
            }
            int64_t left = 0; /* rows in which something changed */
            for (int64_t r = 0; r < count; r++)
                if (changed[r]) rows[left++] = rows[r];
            count = left;
        }
    }
    free(changes);
    return 0;
}
