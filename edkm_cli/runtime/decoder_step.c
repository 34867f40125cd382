/* One new token through all decoder layers of a LLaMA-like model, in one call: norm, q k v, rotary embedding, cache,
 * attention, o, norm, gate up, SiLU, down. What is a microsecond here is thirty in Python, and a token takes hundreds.
 *
 * The residual stream is float32; what a matrix is multiplied with is rounded to the model's dtype, as its modules do.
 */
#include "packed.h"
#include "threads.h"
#include "vectors.h"

#define MOST_HEAD_SIZE 256
#define AT_ONCE 32 /* of a head, whose size is a multiple of it */
#define AHEAD 1536 /* elements of keys to fetch before they are read; values, while keys are */
#define TOGETHER 4 /* query heads that use a key or value once it is read */
#define SHARED_PAIRS (1 << 16) /* products of a query with cached keys and values from which on threads share heads */

/* What is told of a model; Python lays these structs out (decoder_step_c.py). Sizes are numbers of elements, `width`, `inner` and
 * half a `head_size` multiples of 16. */
typedef struct {
    int64_t layers, width, inner, heads, kv_heads, head_size, dtype;
    double epsilon, scale;
    const void *cosines, *sines; /* (head_size,) of the new token's position */
} Step;

typedef struct {
    /* Structs Packed of lut_linear.c, 3, 1, 2 and 1 matrices in all: matrices of different bits are in different ones, and
     * those that are left over are NULL. */
    const Packed *qkv[3], *o, *gate_up[2], *down;
    const void *input_norm, *post_norm, *q_norm, *k_norm; /* weights in the model's dtype; the last two may be NULL */
    void *keys, *values;                                   /* (kv_heads, room for tokens, head_size) */
    int64_t head_stride;                                   /* elements from a head to the next one in both */
} Layer;

typedef struct {
    const Step *step;
    const Layer *layer;
    const void *q;
    void *out;
    int64_t tokens; /* with the new one */
    float *scores;  /* (heads, padded tokens) */
    int64_t padded;
} Attention;

INLINE void *at_element(const void *data, int64_t dtype, int64_t element) {
    return (char *)data + element * (dtype == FLOAT32 ? 4 : 2);
}

/* y = x / rms(x) * weight; `count` is a multiple of 16. */
static void normalize(
    const void *x, int64_t x_dtype, const void *weight, double epsilon, int64_t dtype, int64_t count, void *y
) {
    vf squares = {};
    for (int64_t i = 0; i < count; i += LANES) {
        vf part = read_lanes(x, x_dtype, i);
        squares += part * part;
    }
    vf factor = splat((float)(1.0 / sqrt(total(squares) / (double)count + epsilon)));
    for (int64_t i = 0; i < count; i += LANES)
        write_lanes(y, dtype, i, read_lanes(x, x_dtype, i) * factor * read_lanes(weight, dtype, i), LANES);
}

/* The same in each head, where there is a weight. */
static void normalize_heads(const Step *step, const void *weight, int64_t heads, void *x) {
    for (int64_t h = 0; weight && h < heads; h++) {
        void *head = at_element(x, step->dtype, h * step->head_size);
        normalize(head, step->dtype, weight, step->epsilon, step->dtype, step->head_size, head);
    }
}

/* x = x cos + (-second half, first half) sin, in each head. */
static void rotate(const Step *step, void *x, int64_t heads) {
    int64_t size = step->head_size, half = size / 2, dtype = step->dtype;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t i = 0; i < half; i += LANES) {
            int64_t low = h * size + i, high = low + half;
            vf a = read_lanes(x, dtype, low), b = read_lanes(x, dtype, high);
            vf first = a * read_lanes(step->cosines, dtype, i) - b * read_lanes(step->sines, dtype, i);
            vf second = b * read_lanes(step->cosines, dtype, half + i) + a * read_lanes(step->sines, dtype, half + i);
            write_lanes(x, dtype, low, first, LANES);
            write_lanes(x, dtype, high, second, LANES);
        }
}

/* softmax(q k^T * scale) v of HEADS query heads from h on that share keys and values, with room for their scores. Sums go in an
 * order that depends on shapes only. */
INLINE void attend_together(int64_t dtype, const Attention *a, int64_t h, const int HEADS, float *scores) {
    const Step *step = a->step;
    int64_t size = step->head_size, base = h / (step->heads / step->kv_heads) * a->layer->head_stride;
    const char *keys = at_element(a->layer->keys, dtype, base), *values = at_element(a->layer->values, dtype, base);
    vf q[TOGETHER][MOST_HEAD_SIZE / LANES], factors[TOGETHER];
    for (int c = 0; c < HEADS; c++)
        for (int64_t i = 0; i < size; i += LANES)
            q[c][i / LANES] = read_lanes(a->q, dtype, (h + c) * size + i) * splat((float)step->scale);
    for (int64_t t = 0; t < a->padded; t += LANES) {
        vf dots[TOGETHER][LANES] = {};
        for (int64_t n = 0, at = t * size; n < LANES && t + n < a->tokens; n++)
            for (int64_t i = 0; i < size; i += LANES, at += LANES) {
                vf key = read_lanes(keys, dtype, at);
                for (int c = 0; c < HEADS; c++) dots[c][n] += q[c][i / LANES] * key;
                __builtin_prefetch(at_element(keys, dtype, at + AHEAD)), __builtin_prefetch(at_element(values, dtype, at), 0, 2);
            }
        for (int c = 0; c < HEADS; c++)
            put(scores + c * a->padded + t, choose(valid(t / LANES, a->tokens), sum_lanes(dots[c]), splat(-INFINITY)));
    }
    for (int c = 0; c < HEADS; c++) {
        float *of = scores + c * a->padded, most = -INFINITY;
        vf top = splat(-INFINITY), mass = {};
        for (int64_t t = 0; t < a->padded; t += LANES) top = greatest(top, *(const vfu *)(of + t));
        for (int lane = 0; lane < LANES; lane++) most = top[lane] > most ? top[lane] : most;
        for (int64_t t = 0; t < a->padded; t += LANES) {
            vf lower = greatest((*(const vfu *)(of + t) - splat(most)) * splat((float)LOG2E), splat(-200));
            vf share = keep(exp2_negative(lower), valid(t / LANES, a->tokens));
            mass += share;
            put(of + t, share);
        }
        factors[c] = splat((float)(1.0 / total(mass)));
    }
    for (int64_t i = 0; i < size; i += AT_ONCE) { /* a part of all values, whose sums are in registers */
        vf sums[TOGETHER][AT_ONCE / LANES] = {};
        for (int64_t t = 0; t < a->tokens; t++)
            for (int v = 0; v < AT_ONCE / LANES; v++) {
                vf value = read_lanes(values, dtype, t * size + i + v * LANES);
                for (int c = 0; c < HEADS; c++) sums[c][v] += splat(scores[c * a->padded + t]) * value;
            }
        for (int c = 0; c < HEADS; c++)
            for (int v = 0; v < AT_ONCE / LANES; v++)
                write_lanes(a->out, dtype, (h + c) * size + i + v * LANES, sums[c][v] * factors[c], LANES);
    }
}

INLINE void attend(int64_t dtype, const Attention *a, int64_t first, int64_t last) {
    int64_t of_group = a->step->heads / a->step->kv_heads;
#define ATTEND_IF(n) if (count == n) attend_together(dtype, a, h, n, a->scores + first * a->padded);
    for (int64_t h = first, count; h < last; h += count) {
        count = smaller(smaller(last, (h / of_group + 1) * of_group) - h, TOGETHER);
        ATTEND_IF(1) ATTEND_IF(2) ATTEND_IF(3) ATTEND_IF(4)
    }
}

#define ATTEND_OF(dtype) \
    static void attend_##dtype(const void *job, int64_t first, int64_t last) { attend(dtype, job, first, last); }
ATTEND_OF(FLOAT32) ATTEND_OF(BFLOAT16) ATTEND_OF(FLOAT16)
static void (*const ATTEND[])(const void *, int64_t, int64_t) = {attend_FLOAT32, attend_BFLOAT16, attend_FLOAT16};

/* gate = silu(gate) * up, of `count` values, a multiple of 16. */
static void activate(int64_t dtype, int64_t count, void *gate, const void *up) {
    for (int64_t i = 0; i < count; i += LANES) {
        vf g = read_lanes(gate, dtype, i), lower = greatest(choose(g < splat(0), g, -g) * splat((float)LOG2E), splat(-126));
        vf e = exp2_negative(lower); /* e^-|g|, so that nothing overflows */
        vf silu = g * choose(g < splat(0), e, splat(1)) / (splat(1) + e);
        write_lanes(gate, dtype, i, silu * read_lanes(up, dtype, i), LANES);
    }
}

static void add(const void *x, int64_t dtype, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += LANES) put(to + i, *(const vfu *)(to + i) + read_lanes(x, dtype, i));
}

/* Products of x with all matrices of `count` structs Packed, one after the other to `outs`. */
static int multiply(const Packed *const *packed, int count, const void *x, int64_t dtype, int64_t columns, void **outs) {
    int failed = 0;
    for (int i = 0; i < count && packed[i]; i++) {
        failed |= edkm_lut_linear(packed[i], x, dtype, columns, 1, outs, 0);
        outs += packed[i]->count;
    }
    return failed;
}

/* Adds to `hidden` (width,) float32 what all layers add, and to each layer's cache its key and value, at place `past`.
 * Returns 1 where memory is short. */
int edkm_decoder_step(const Step *step, const Layer *layers, int64_t past, float *hidden) {
    int64_t q_size = step->heads * step->head_size, kv_size = step->kv_heads * step->head_size, dtype = step->dtype;
    int64_t padded = (past / LANES + 1) * LANES, widest = step->width > q_size ? step->width : q_size;
    float *own = scratch((size_t)(2 * widest + q_size + 2 * kv_size + 2 * step->inner + step->heads * padded));
    if (!own) return 1;
    float *normed = own, *summed = normed + widest, *q = summed + widest, *k = q + q_size, *v = k + kv_size;
    float *gate = v + kv_size, *up = gate + step->inner, *scores = up + step->inner;
    int failed = 0;
    for (int64_t l = 0; l < step->layers && !failed; l++) {
        const Layer *layer = layers + l;
        void *first[] = {q, k, v}, *second[] = {summed}, *third[] = {gate, up};
        normalize(hidden, FLOAT32, layer->input_norm, step->epsilon, dtype, step->width, normed);
        failed |= multiply(layer->qkv, 3, normed, dtype, step->width, first);
        normalize_heads(step, layer->q_norm, step->heads, q);
        normalize_heads(step, layer->k_norm, step->kv_heads, k);
        rotate(step, q, step->heads);
        rotate(step, k, step->kv_heads);
        size_t bytes = (size_t)step->head_size * (dtype == FLOAT32 ? 4 : 2);
        for (int64_t h = 0; h < step->kv_heads; h++) {
            int64_t place = h * layer->head_stride + past * step->head_size;
            memcpy(at_element(layer->keys, dtype, place), at_element(k, dtype, h * step->head_size), bytes);
            memcpy(at_element(layer->values, dtype, place), at_element(v, dtype, h * step->head_size), bytes);
        }
        Attention attention = {step, layer, q, normed, past + 1, scores, padded};
        share(ATTEND[dtype], &attention, step->heads, q_size * (past + 1) >= SHARED_PAIRS);
        failed |= edkm_lut_linear(layer->o, normed, dtype, q_size, 1, second, 0);
        add(summed, dtype, step->width, hidden);
        normalize(hidden, FLOAT32, layer->post_norm, step->epsilon, dtype, step->width, normed);
        failed |= multiply(layer->gate_up, 2, normed, dtype, step->width, third);
        activate(dtype, step->inner, gate, up);
        failed |= edkm_lut_linear(layer->down, gate, dtype, step->inner, 1, second, 0);
        add(summed, dtype, step->width, hidden);
    }
    return failed;
}

/* Attention of a new token in each of many sequences; `heads` and `kv_heads` count those of all. Returns 1 where memory is short. */
int edkm_attend(const Step *step, const Layer *layer, int64_t tokens, const void *q, void *out) {
    Attention attention = {step, layer, q, out, tokens, NULL, (tokens + LANES - 1) / LANES * LANES};
    if (!(attention.scores = scratch((size_t)(step->heads * attention.padded)))) return 1;
    share(ATTEND[step->dtype], &attention, step->heads, 1);
    return 0;
}
