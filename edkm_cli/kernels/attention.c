/* The passes of closed_form.py: attention computed from a weight in registers, reduced, thrown away.
 *
 * Per weight and centroid: d = w - c, logit = (min d^2 - d^2) / tau, A = softmax. In the moments a weight counts by its
 * importance m; without one (m NULL) all count alike. Sums over at most BLOCK weights are
 * float32 in 16 lanes, all longer ones double. Each function works on units [first, last) and writes partial sums of
 * its own, so that threads never meet and the result doesn't depend on their number.
 */
#include "lanes.h"

/* Attention of 16 weights to k centroids; lanes outside the mask get none. */
INLINE void attend(vf w, const float *c, int k, float scale, vi mask, vf *a) {
    vf nearest = splat(INFINITY), sum = {};
    for (int j = 0; j < k; j++) {
        vf d = w - c[j];
        a[j] = d * d;
        nearest = least(a[j], nearest); /* a NaN is passed on by the sum below */
    }
    for (int j = 0; j < k; j++) {
        a[j] = exp2_negative((nearest - a[j]) * scale);
        sum += a[j];
    }
    vf share = keep(1.0f / sum, mask);
    for (int j = 0; j < k; j++) a[j] *= share;
}

INLINE void moments_block(const float *w, const float *m, int64_t count, const float *c, int k, float scale, double *shift, double *mass) {
    vf a[MAX_K], shifts[MAX_K], masses[MAX_K];
    for (int j = 0; j < k; j++) shifts[j] = masses[j] = (vf){};
    for (int64_t v = 0; v * LANES < count; v++) {
        vf x = *(const vf *)(w + v * LANES);
        attend(x, c, k, scale, valid(v, count), a);
        for (int j = 0; m && j < k; j++) a[j] *= *(const vf *)(m + v * LANES);
        for (int j = 0; j < k; j++) {
            masses[j] += a[j];
            shifts[j] += a[j] * (x - c[j]);
        }
    }
    for (int j = 0; j < k; j++) shift[j] += total(shifts[j]), mass[j] += total(masses[j]);
}

INLINE void soft_block(float *w, int64_t count, const float *c, int k, float scale) {
    vf a[MAX_K];
    for (int64_t v = 0; v * LANES < count; v++) {
        vf x = *(vf *)(w + v * LANES), mean = {};
        attend(x, c, k, scale, valid(v, count), a);
        for (int j = 0; j < k; j++) mean += a[j] * c[j];
        *(vf *)(w + v * LANES) = mean;
    }
}

/* Of what `soft` gives: u_ij = c_j, p_ij = g_i A_ij (u_ij - sum_l A_il u_il), and g becomes the weight's gradient. Of moments:
 * u_ij = pull_j (w_i - c'_j), m_i instead of g_i, and the weight's gradient g is added to. */
INLINE void backward_block(
    int soft, const float *w, const float *m, float *g, int64_t count, const float *c, const float *moved, const float *pull,
    int k, float scale, float twice, double *grad_c, double *grad_tau
) {
    vf a[MAX_K], sums[MAX_K], tau_sum = {};
    for (int j = 0; j < k; j++) sums[j] = (vf){};
    for (int64_t v = 0; v * LANES < count; v++) {
        vf x = *(const vf *)(w + v * LANES), before = *(vf *)(g + v * LANES), mean = {}, grad = {}, direct = {};
        attend(x, c, k, scale, valid(v, count), a);
        for (int j = 0; j < k; j++) mean += a[j] * (soft ? splat(c[j]) : (x - moved[j]) * pull[j]);
        for (int j = 0; m && j < k; j++) a[j] *= *(const vf *)(m + v * LANES);
        for (int j = 0; j < k; j++) {
            vf d = x - c[j], u = soft ? splat(c[j]) : (x - moved[j]) * pull[j], of_u = soft ? before * a[j] : a[j];
            vf part = of_u * (u - mean) * d;
            if (!soft) direct += a[j] * pull[j];
            grad += part;
            sums[j] += soft ? of_u + part * twice : part;
            tau_sum += part * d;
        }
        *(vf *)(g + v * LANES) = soft ? grad * -twice : before + (direct - grad * twice);
    }
    for (int j = 0; j < k; j++) grad_c[j] += total(sums[j]) * (soft ? 1 : (double)twice);
    *grad_tau += total(tau_sum);
}

/* The number of centroids as a constant for 2, 3 and 4 bits: loops unroll and attention stays in registers. */
#define WITH_CONSTANT_K(k, call)               \
    switch (k) {                               \
        case 4: { enum { K = 4 }; call; } break;   \
        case 8: { enum { K = 8 }; call; } break;   \
        case 16: { enum { K = 16 }; call; } break; \
        default: { int K = (int)(k); call; }       \
    }

/* Count-free mean and sum of squared deviations of each piece; joined pairwise, which cancels nothing. */
void edkm_spread(
    const Layout *layout, const Matrix *weight, double *counts, double *means, double *squares, int64_t first, int64_t last
) {
    float w[BLOCK] __attribute__((aligned(64)));
    FOR_PIECES(layout, piece, first, last) {
        double n = 0, mean = 0, square = 0;
        FOR_RECTS(piece, rect) {
            int64_t count = load(weight, layout, rect, w);
            vf sum = {}, squared = {};
            for (int64_t v = 0; v * LANES < count; v++) sum += *(vf *)(w + v * LANES) - w[0];
            double here = w[0] + total(sum) / count; /* copies of w[0] in the last vector add nothing */
            for (int64_t v = 0; v * LANES < count; v++) {
                vf d = *(vf *)(w + v * LANES) - (float)here;
                squared += keep(d * d, valid(v, count));
            }
            double delta = here - mean, rounding = here - (float)here;
            square += total(squared) - count * rounding * rounding + delta * delta * n * count / (n + count);
            mean += delta * count / (n + count);
            n += count;
        }
        counts[piece.slot] = n, means[piece.slot] = mean, squares[piece.slot] = square < 0 ? 0 : square;
    }
}

void edkm_moments(
    const Layout *layout, const Matrix *weight, const Matrix *importance, const float *centroids, const double *tau,
    double *shift, double *mass, int64_t first, int64_t last
) {
    unsigned mode = flush_tiny();
    float w[BLOCK] __attribute__((aligned(64))), m[BLOCK] __attribute__((aligned(64)));
    const float *masses = importance->data ? m : NULL;
    int64_t k = layout->k;
    FOR_PIECES(layout, piece, first, last) {
        const float *c = centroids + piece.group * k;
        float scale = (float)(LOG2E / tau[piece.group]);
        double *to_shift = shift + piece.slot * k, *to_mass = mass + piece.slot * k;
        for (int64_t j = 0; j < k; j++) to_shift[j] = to_mass[j] = 0;
        FOR_RECTS(piece, rect) {
            int64_t count = load(weight, layout, rect, w);
            if (masses) load(importance, layout, rect, m);
            WITH_CONSTANT_K(k, moments_block(w, masses, count, c, K, scale, to_shift, to_mass));
        }
    }
    restore(mode);
}

void edkm_soft(
    const Layout *layout, const Matrix *weight, const float *centroids, const double *tau, const Matrix *out, int64_t first,
    int64_t last
) {
    unsigned mode = flush_tiny();
    float w[BLOCK] __attribute__((aligned(64)));
    int64_t k = layout->k;
    FOR_PIECES(layout, piece, first, last) {
        const float *c = centroids + piece.group * k;
        float scale = (float)(LOG2E / tau[piece.group]);
        FOR_RECTS(piece, rect) {
            int64_t count = load(weight, layout, rect, w);
            WITH_CONSTANT_K(k, soft_block(w, count, c, K, scale));
            store((void *)out->data, out->dtype, layout, rect, w);
        }
    }
    restore(mode);
}

/* Backward of `edkm_soft`, with `grad` that of its output, or, with `moved` and `pull`, of `edkm_moments`, added to `grad`. */
void edkm_backward(
    const Layout *layout, const Matrix *weight, const Matrix *importance, const float *centroids, const double *tau,
    const Matrix *grad, const float *moved, const float *pull, const Matrix *grad_weight, double *grad_centroids,
    double *grad_tau, int64_t first, int64_t last
) {
    unsigned mode = flush_tiny();
    float w[BLOCK] __attribute__((aligned(64))), g[BLOCK] __attribute__((aligned(64))), m[BLOCK] __attribute__((aligned(64)));
    const float *masses = importance->data ? m : NULL;
    int64_t k = layout->k;
    FOR_PIECES(layout, piece, first, last) {
        int64_t at = piece.group * k;
        const float *c = centroids + at;
        float scale = (float)(LOG2E / tau[piece.group]), twice = (float)(2.0 / tau[piece.group]);
        double *to_c = grad_centroids + piece.slot * k, *to_tau = grad_tau + piece.slot;
        for (int64_t j = 0; j < k; j++) to_c[j] = 0;
        *to_tau = 0;
        FOR_RECTS(piece, rect) {
            int64_t count = load(weight, layout, rect, w);
            load(grad, layout, rect, g);
            if (masses) load(importance, layout, rect, m);
            if (moved) {
                const float *to = moved + at, *by = pull + at;
                WITH_CONSTANT_K(k, backward_block(0, w, masses, g, count, c, to, by, K, scale, twice, to_c, to_tau));
            } else {
                WITH_CONSTANT_K(k, backward_block(1, w, NULL, g, count, c, NULL, NULL, K, scale, twice, to_c, to_tau));
            }
            store((void *)grad_weight->data, FLOAT32, layout, rect, g);
        }
    }
    restore(mode);
}

/* out = grad_weight + pull_group (w - mean_group) */
void edkm_weight_gradient(
    const Layout *layout, const Matrix *weight, const Matrix *grad_weight, const double *mean, const double *pull,
    const Matrix *out, int64_t first, int64_t last
) {
    float w[BLOCK] __attribute__((aligned(64))), g[BLOCK] __attribute__((aligned(64)));
    FOR_PIECES(layout, piece, first, last) {
        float at = (float)mean[piece.group], by = (float)pull[piece.group];
        FOR_RECTS(piece, rect) {
            int64_t count = load(weight, layout, rect, w);
            load(grad_weight, layout, rect, g);
            for (int64_t i = 0; i < count; i++) g[i] += (w[i] - at) * by;
            store((void *)out->data, out->dtype, layout, rect, g);
        }
    }
}
