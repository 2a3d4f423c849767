/* Tensors as they lie in memory, of the dtypes that a model has and with any strides, and rows of them. vectors.c comes
 * before.
 */
enum { FLOAT, BFLOAT, HALF, DOUBLE, BOOL };
#define OWN (sizeof(real) == sizeof(float) ? FLOAT : DOUBLE)

/* Strides in elements, in the order of the dimensions; the kinds above, see KINDS of operands.py. */
struct operand {
    const void *data;
    int64_t kind, stride[4];
};

union bits {
    float value;
    uint32_t bits;
};

INLINE float of_half(uint16_t x)
{
    union bits wide = {.bits = (uint32_t)(x & 0x7fff) << 13};
    wide.value *= 0x1p112f; /* the exponent counts from -15, not -127; numbers below the normal ones come out right */
    if ((x & 0x7fff) >= 0x7c00)
        wide.bits |= 0x7f800000;
    wide.bits |= (uint32_t)(x & 0x8000) << 16;
    return wide.value;
}

/* To the nearest, to even. */
INLINE uint16_t to_half(float value)
{
    union bits x = {value};
    const uint16_t sign = x.bits >> 16 & 0x8000;
    x.bits &= 0x7fffffff;
    if (x.bits > 0x7f800000)
        return sign | 0x7e00;
    if (x.bits >= 0x477ff000)
        return sign | 0x7c00;
    if (x.bits < 0x38800000) { /* below the normal numbers: the last place of 0.5 is that of those */
        x.value += 0.5f;
        return sign | (uint16_t)(x.bits - 0x3f000000);
    }
    x.bits += 0xfff + (x.bits >> 13 & 1);
    return sign | (uint16_t)((x.bits - 0x38000000) >> 13);
}

INLINE uint16_t to_bfloat(float value)
{
    const union bits x = {value};
    return value != value ? 0x7fc0 : (uint16_t)((x.bits + 0x7fff + (x.bits >> 16 & 1)) >> 16);
}

INLINE float of_bfloat(uint16_t x)
{
    const union bits wide = {.bits = (uint32_t)x << 16};
    return wide.value;
}

INLINE real element(const struct operand *x, int64_t place)
{
    switch (x->kind) {
    case FLOAT:
        return ((const float *)x->data)[place];
    case BFLOAT:
        return of_bfloat(((const uint16_t *)x->data)[place]);
    case HALF:
        return of_half(((const uint16_t *)x->data)[place]);
    default:
        return (real)((const double *)x->data)[place];
    }
}

/* ``count`` elements from ``place``, ``step`` apart, into a row that is padded with zeros. */
static void read(const struct operand *x, int64_t place, int64_t step, int64_t count, real *to, int64_t padded)
{
    int64_t i = 0;
    if (x->kind == OWN) {
        const real *from = (const real *)x->data + place;
        for (; step == 1 && i + LANES <= count; i += LANES)
            *(loose *)(to + i) = *(const loose *)(from + i);
        for (; i < count; i++)
            to[i] = from[i * step];
    }
    if (x->kind == BFLOAT) {
        const uint16_t *from = (const uint16_t *)x->data + place;
        for (; i < count; i++)
            to[i] = of_bfloat(from[i * step]);
    }
    for (; i < count; i++)
        to[i] = element(x, place + i * step);
    for (; i < padded; i++)
        to[i] = 0;
}

/* A row times a factor, into a tensor of any kind from ``place`` on. */
static void write(void *out, int64_t kind, int64_t place, int64_t step, const real *from, real factor, int64_t count)
{
    switch (kind) {
    case FLOAT:
        for (int64_t i = 0; i < count; i++)
            ((float *)out)[place + i * step] = (float)(from[i] * factor);
        return;
    case BFLOAT:
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)out)[place + i * step] = to_bfloat((float)(from[i] * factor));
        return;
    case HALF:
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)out)[place + i * step] = to_half((float)(from[i] * factor));
        return;
    default:
        for (int64_t i = 0; i < count; i++)
            ((double *)out)[place + i * step] = from[i] * factor;
    }
}

INLINE int64_t in_vectors(int64_t count)
{
    return (count + LANES - 1) / LANES * LANES;
}

/* torch_parallel_for */
typedef int divide(int64_t begin, int64_t end, int64_t grain, void (*run)(int64_t, int64_t, void *), void *context);

/* Tasks on torch's threads, at least ``grain`` on each; on this one where there are no more. */
static int shared_out(divide *divide, int64_t tasks, int64_t grain, void (*run)(int64_t, int64_t, void *), void *context)
{
    grain = grain > 1 ? grain : 1;
    if (tasks > grain)
        return divide(0, tasks, grain, run, context);
    run(0, tasks, context);
    return 0;
}
