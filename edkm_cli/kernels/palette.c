/* The nearest LUT entry of each weight, and the sums an entry gathers: passes_torch.py's functions.
 *
 * Distance |w - c| in float32, strictly smaller wins: one correctly rounded subtraction, so the index is the reference's.
 */
#include "lanes.h"

/* The nearest of k entries for 16 weights, which needs no gather; returns its index. */
INLINE vi nearest_lanes(vf w, const float *c, int k, vf *entry) {
    const vi magnitude = splat_int(0x7fffffff);
    vf best = keep(w - c[0], magnitude);
    vi index = {};
    *entry = splat(c[0]);
    for (int j = 1; j < k; j++) {
        vf distance = keep(w - c[j], magnitude);
        index = (vi)choose_if_less(distance, best, (vf)splat_int(j), (vf)index);
        *entry = choose_if_less(distance, best, splat(c[j]), *entry);
        best = least(distance, best);
    }
    return index;
}

void edkm_nearest(
    const Layout *layout, const Matrix *weight, const float *centroids, uint8_t *indices, int64_t first, int64_t last
) {
    float w[BLOCK] __attribute__((aligned(64)));
    uint8_t found[BLOCK];
    FOR_PIECES(layout, piece, first, last) {
        const float *c = centroids + piece.group * layout->k;
        FOR_RECTS(piece, rect) {
            int64_t count = load(weight, layout, rect, w);
            for (int64_t v = 0; v * LANES < count; v++) {
                vf entry;
                vi index = nearest_lanes(*(vf *)(w + v * LANES), c, (int)layout->k, &entry);
                for (int l = 0; l < LANES; l++) found[v * LANES + l] = (uint8_t)index[l];
            }
            for (int64_t r = 0; r < rect.rows; r++)
                memcpy(indices + (rect.row + r) * layout->stride + rect.column, found + r * rect.columns, rect.columns);
        }
    }
}

/* Sets flawed[unit] where a weight is NaN or Inf. */
void edkm_snap(
    const Layout *layout, const Matrix *weight, const float *centroids, const Matrix *out, uint8_t *flawed, int64_t first,
    int64_t last
) {
    float w[BLOCK] __attribute__((aligned(64)));
    FOR_PIECES(layout, piece, first, last) {
        const float *c = centroids + piece.group * layout->k;
        vf zero = {};
        FOR_RECTS(piece, rect) {
            int64_t count = load(weight, layout, rect, w);
            for (int64_t v = 0; v * LANES < count; v++) {
                vf x = *(vf *)(w + v * LANES), entry;
                zero += x - x;
                if (layout->k == 8) nearest_lanes(x, c, 8, &entry);
                else nearest_lanes(x, c, (int)layout->k, &entry);
                *(vf *)(w + v * LANES) = entry;
            }
            store((void *)out->data, out->dtype, layout, rect, w);
        }
        if (total(zero) != 0) flawed[unit] = 1;
    }
}

/* Partial sums [unit][tile column][k] of `grad` over the weights nearest to each entry. */
void edkm_sum_by_entry(
    const Layout *layout, const Matrix *weight, const float *centroids, const Matrix *grad, double *sums, int64_t first,
    int64_t last
) {
    float w[BLOCK] __attribute__((aligned(64))), g[BLOCK] __attribute__((aligned(64)));
    int k = (int)layout->k;
    FOR_PIECES(layout, piece, first, last) {
        const float *c = centroids + piece.group * k;
        double *to = sums + piece.slot * k;
        vf entry;
        for (int j = 0; j < k; j++) to[j] = 0;
        FOR_RECTS(piece, rect) {
            int64_t count = load(weight, layout, rect, w);
            load(grad, layout, rect, g);
            if (k == 8) {
                vf part[8] = {};
                for (int64_t v = 0; v * LANES < count; v++) {
                    vi index = nearest_lanes(*(vf *)(w + v * LANES), c, 8, &entry);
                    vf upstream = keep(*(vf *)(g + v * LANES), valid(v, count));
                    for (int j = 0; j < 8; j++) part[j] = add_if_equal(part[j], index, splat_int(j), upstream);
                }
                for (int j = 0; j < 8; j++) to[j] += total(part[j]);
            } else {
                for (int64_t v = 0; v * LANES < count; v++) {
                    vi index = nearest_lanes(*(vf *)(w + v * LANES), c, k, &entry);
                    for (int64_t l = 0; l < LANES && v * LANES + l < count; l++) to[index[l]] += g[v * LANES + l];
                }
            }
        }
    }
}

void edkm_lookup(
    const Layout *layout, const uint8_t *indices, const float *centroids, const Matrix *out, int64_t first, int64_t last
) {
    float found[BLOCK] __attribute__((aligned(64)));
    FOR_PIECES(layout, piece, first, last) {
        const float *c = centroids + piece.group * layout->k;
        FOR_RECTS(piece, rect) {
            for (int64_t r = 0; r < rect.rows; r++) {
                const uint8_t *from = indices + (rect.row + r) * layout->stride + rect.column;
                for (int64_t i = 0; i < rect.columns; i++) found[r * rect.columns + i] = c[from[i]];
            }
            store((void *)out->data, out->dtype, layout, rect, found);
        }
    }
}
