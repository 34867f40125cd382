/* Columns of a weight rounded one after the other, each error passed on to the columns still to come: passes_torch.py.
 *
 * Rows are independent, so some of them go side by side in the lanes of a vector, with all columns of a block in the first
 * cache: a few vector operations an entry to find the nearest, and one a later column to pass the error on.
 */
#include "lanes.h"

#define MAX_COLUMNS 128
#define ROWS 16 /* of a unit */

INLINE vf some(const float *from, int64_t count) {
    if (count == LANES) return *(const vfu *)from;
    vf lanes = {};
    memcpy(&lanes, from, count * sizeof(float));
    return lanes;
}

INLINE void put(float *to, vf lanes, int64_t count) { memcpy(to, &lanes, count * sizeof(float)); }

/* block, errors (columns, rows); luts (tiles, k, rows), ascending along k; factor (columns, columns); a unit is 16 rows. */
void edkm_round_columns(
    float *block, float *errors, const float *luts, const int64_t *tiles, const float *factor, int64_t columns,
    int64_t rows, int64_t k, int64_t first, int64_t last
) {
    vf w[MAX_COLUMNS];
    for (int64_t row = first * ROWS; row < smaller(last * ROWS, rows); row += LANES) {
        int64_t count = smaller(LANES, rows - row);
        for (int64_t j = 0; j < columns; j++) w[j] = some(block + j * rows + row, count);
        for (int64_t j = 0; j < columns; j++) {
            const float *c = luts + tiles[j] * k * rows + row;
            vf entry = some(c, count), below = entry, twice = w[j] + w[j];
            for (int64_t i = 1; i < k; i++) {
                vf above = some(c + i * rows, count);
                entry = choose(twice > below + above, above, entry);
                below = above;
            }
            vf error = w[j] - entry;
            put(errors + j * rows + row, error, count);
            for (int64_t t = j + 1; t < columns; t++) w[t] -= factor[j * columns + t] * error;
        }
        for (int64_t j = 0; j < columns; j++) put(block + j * rows + row, w[j], count);
    }
}
