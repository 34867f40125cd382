/* What edkm_decoder_step is told of a model; Python lays these structs out (decoder_step_c.py). Sizes are numbers of
 * elements, `width`, `inner` and half a `head_size` multiples of 16. */
#ifndef EDKM_DECODER_STEP
#define EDKM_DECODER_STEP

#include <stdint.h>

#define MOST_HEAD_SIZE 256

typedef struct {
    int64_t layers, width, inner, heads, kv_heads, head_size, dtype;
    double epsilon, scale;
    const void *cosines, *sines; /* (head_size,) of the new token's position */
} Step;

typedef struct {
    /* Structs Packed of lut_linear.c, 3, 1, 2 and 1 matrices in all: matrices of different bits are in different ones, and
     * those that are left over are NULL. */
    const void *qkv[3], *o, *gate_up[2], *down;
    const void *input_norm, *post_norm, *q_norm, *k_norm; /* weights in the model's dtype; the last two may be NULL */
    void *keys, *values;                                   /* (kv_heads, room for tokens, head_size) */
    int64_t head_stride;                                   /* elements from a head to the next one in both */
} Layer;

int edkm_lut_linear(
    const void *packed, const void *x, int64_t dtype, int64_t x_row, int64_t tokens, void *const *outs
);

int64_t edkm_matrices_of(const void *packed);

#endif
