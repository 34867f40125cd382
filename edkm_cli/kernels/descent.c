/* Choices of entries improved one column after the other: passes_torch.py.
 *
 * Rows are independent. After the first sweep few weights change, and one that stays costs a comparison: it stays where the
 * best value is nearer to its entry than half the way to any other. One that changes raises the errors of the whole row.
 * Inside its block of columns they are raised at once, in other blocks when their turn comes, from a list of changes: so
 * the part of H between two blocks, which stays in a near cache, serves many rows, and H is read once for all of them in a
 * sweep. Each error still gets the changes one by one in the order in which they were made.
 */
#include <stdlib.h>

#include "lanes.h"

enum { BESIDE = 128, ROWS = 512, VECTORS = BESIDE / LANES }; /* columns of a block, rows that share H */

typedef struct {
    int32_t column; /* of its block */
    float by;
} Change;

typedef struct {
    const float *hessian;
    float *diagonal;
    float *reach;    /* [ROWS][tiles * k]: a weight at this entry stays if it is best at less than that from it */
    Change *changes; /* [ROWS][columns]: of each block of columns from its first one on */
    int32_t *counts; /* [blocks][ROWS] */
    float *part;     /* [BESIDE][BESIDE] of H */
    int64_t columns, width, k;
} Work;

/* Errors of one row's block, all changes of another block added in their order; `part` is H between the two. */
static void pass_on(float *errors, const Change *changes, int64_t count, const float *part, int64_t across) {
    if (across < BESIDE) {
        for (int64_t c = 0; c < count; c++)
            for (int64_t i = 0; i < across; i++) errors[i] += changes[c].by * part[changes[c].column * BESIDE + i];
        return;
    }
    vf sums[VECTORS];
    for (int v = 0; v < VECTORS; v++) sums[v] = *(const vfu *)(errors + v * LANES);
    for (int64_t c = 0; c < count; c++) {
        const vf *h = (const vf *)(part + changes[c].column * BESIDE), by = splat(changes[c].by);
        for (int v = 0; v < VECTORS; v++) sums[v] += by * h[v];
    }
    for (int v = 0; v < VECTORS; v++) *(vfu *)(errors + v * LANES) = sums[v];
}

/* What all rows' changes in the block at `from` do to the errors of the block at `start`. */
static void pass_on_all(
    float *errors, const Work *work, const int32_t *counts, const int64_t *rows, int64_t count, int64_t from, int64_t start
) {
    const int64_t down = smaller(BESIDE, work->columns - from), across = smaller(BESIDE, work->columns - start);
    int packed = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t r = rows[i];
        if (counts[r] == 0) continue;
        for (int64_t j = 0; !packed && j < down; j++) /* rows of H that are a power of two apart share few cache lines */
            memcpy(work->part + j * BESIDE, work->hessian + (from + j) * work->columns + start, across * sizeof(float));
        packed = 1;
        pass_on(errors + r * work->columns + start, work->changes + r * work->columns + from, counts[r], work->part, across);
    }
}

/* One row's columns [start, end), each change passed on inside of them and noted; returns how many there are. */
static int32_t choose_entries(
    uint8_t *chosen, float *errors, const float *tables, const float *reach, const Work *work, int64_t start, int64_t end,
    Change *changes
) {
    const int64_t k = work->k;
    int32_t count = 0;
    for (int64_t j = start; j < end; j++) {
        const int64_t table = j / work->width * k;
        if (fabsf(errors[j]) < reach[table + chosen[j]] * work->diagonal[j]) continue;
        const float *entries = tables + table, *h = work->hessian + j * work->columns;
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
        changes[count++] = (Change){(int32_t)(j - start), change};
    }
    return count;
}

/* A little less than half the distance of each entry to the nearest other one. */
static void find_reach(const float *entries, float *reach, int64_t k) {
    for (int64_t a = 0; a < k; a++) {
        float least = INFINITY;
        for (int64_t b = 0; b < k; b++)
            if (b != a) least = fminf(least, fabsf(entries[a] - entries[b]));
        reach[a] = 0.4999f * least;
    }
}

/* indices (rows, columns); errors (rows, columns), used up; luts (rows, tiles, k); hessian (columns, columns); a unit is a
 * row. Returns 0, or 1 where there is no memory for the changes. */
int edkm_descend(
    uint8_t *indices, float *errors, const float *luts, const float *hessian, int64_t columns, int64_t tiles, int64_t k,
    int64_t sweeps, int64_t first, int64_t last
) {
    const int64_t blocks = (columns + BESIDE - 1) / BESIDE, entries = tiles * k;
    const size_t floats = BESIDE * BESIDE + columns + ROWS * (entries + 2 * columns + blocks); /* a change is as large as two */
    Work work = {.hessian = hessian, .columns = columns, .width = columns / tiles, .k = k};
    if (posix_memalign((void **)&work.part, 64, floats * sizeof(float))) return 1;
    work.diagonal = work.part + BESIDE * BESIDE, work.reach = work.diagonal + columns;
    work.changes = (Change *)(work.reach + ROWS * entries), work.counts = (int32_t *)(work.changes + ROWS * columns);
    for (int64_t j = 0; j < columns; j++) work.diagonal[j] = hessian[j * columns + j];
    for (int64_t top = first; top < last; top += ROWS) {
        int64_t rows[ROWS], count = smaller(ROWS, last - top);
        for (int64_t r = 0; r < count; r++) {
            rows[r] = r;
            for (int64_t tile = 0; tile < tiles; tile++)
                find_reach(luts + (top + r) * entries + tile * k, work.reach + r * entries + tile * k, k);
        }
        memset(work.counts, 0, blocks * ROWS * sizeof(int32_t));
        for (int64_t sweep = 0; sweep < sweeps && count; sweep++) {
            uint8_t changed[ROWS] = {0};
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t start = block * BESIDE, end = smaller(start + BESIDE, columns);
                for (int64_t step = 1; step < blocks; step++) { /* those of the last sweep first */
                    const int64_t other = (block + step) % blocks;
                    pass_on_all(errors + top * columns, &work, work.counts + other * ROWS, rows, count, other * BESIDE, start);
                }
                for (int64_t i = 0; i < count; i++) {
                    const int64_t r = rows[i], row = top + r;
                    work.counts[block * ROWS + r] = choose_entries(
                        indices + row * columns, errors + row * columns, luts + row * entries, work.reach + r * entries, &work,
                        start, end, work.changes + r * columns + start
                    );
                    changed[r] |= work.counts[block * ROWS + r] > 0;
                }
            }
            int64_t left = 0; /* rows in which something changed */
            for (int64_t i = 0; i < count; i++)
                if (changed[rows[i]]) rows[left++] = rows[i];
            count = left;
        }
    }
    free(work.part);
    return 0;
}
