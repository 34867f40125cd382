/* Choices of entries improved one column after the other: descent_torch.py.
 *
 * Rows are independent. After the first sweep few weights change, and one that stays costs only the search among its
 * entries; one that changes passes its change on to the whole row.
 */
#include "lanes.h"

/* indices (rows, columns); errors (rows, columns); luts (rows, tiles, k); hessian (columns, columns); a unit is a row. */
void edkm_descend(
    uint8_t *indices, float *errors, const float *luts, const float *hessian, int64_t columns, int64_t tiles, int64_t k,
    int64_t sweeps, int64_t first, int64_t last
) {
    const int64_t width = columns / tiles;
    for (int64_t row = first; row < last; row++) {
        uint8_t *chosen = indices + row * columns;
        float *r = errors + row * columns;
        for (int64_t sweep = 0, changed = 1; sweep < sweeps && changed; sweep++) {
            changed = 0;
            for (int64_t j = 0; j < columns; j++) {
                const float *entries = luts + (row * tiles + j / width) * k, *h = hessian + j * columns;
                const float now = entries[chosen[j]], best = now - r[j] / h[j];
                int64_t nearest = 0;
                float distance = fabsf(entries[0] - best);
                for (int64_t i = 1; i < k; i++) {
                    const float other = fabsf(entries[i] - best);
                    nearest = other < distance ? i : nearest;
                    distance = other < distance ? other : distance;
                }
                if (nearest == chosen[j]) continue;
                const float change = entries[nearest] - now;
                for (int64_t i = 0; i < columns; i++) r[i] += change * h[i];
                chosen[j] = (uint8_t)nearest;
                changed = 1;
            }
        }
    }
}
