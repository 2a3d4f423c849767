/* The functions that gates are written in, on vectors; vectors.c comes before. In fp32 by polynomials, to some units in
 * the last place; in fp64 by the C library, element by element.
 */
#ifdef DOUBLE_PRECISION
typedef int64_t whole __attribute__((vector_size(VECTOR_BYTES)));

INLINE vector exponential(vector x)
{
    for (int i = 0; i < LANES; i++)
        x[i] = __builtin_exp(x[i]);
    return x;
}

INLINE vector logarithm(vector x)
{
    for (int i = 0; i < LANES; i++)
        x[i] = __builtin_log(x[i]);
    return x;
}
#else
typedef int32_t whole __attribute__((vector_size(VECTOR_BYTES)));

INLINE vector chosen(whole which, vector x, vector y)
{
    return (vector)(((whole)x & which) | ((whole)y & ~which));
}

/* 2^n e^r with |r| <= ln 2 / 2, as Cephes has it (2 ulp); 0 below 2^-125, infinity above all. */
INLINE vector exponential(vector x)
{
    const vector rounder = (vector){0} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const whole small = x < (vector){0} - 86.98f, large = x > (vector){0} + 88.72f;
    const vector shifted = x * 1.44269504088896341f + rounder;
    const vector n = shifted - rounder;
    const vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vector y = (vector){0} + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    /* the integer stands in the low bits of ``shifted``, and 126 + n is the exponent of 2^(n - 1), finite for n = 128 */
    const whole power = ((whole)shifted - 0x4b400000 + 126) << 23;
    y = y * 2 * (vector)power;
    return chosen(large, (vector){0} + __builtin_inff(), (vector)((whole)y & ~small));
}

/* As Cephes has it: x = 2^n m, m in [sqrt(1/2), sqrt(2)); a number below the normal ones counts as 0. */
INLINE vector logarithm(vector x)
{
    const whole bits = (whole)x, small = x < (vector){0} + 1.17549435e-38f, negative = x < (vector){0};
    const whole beyond = ~(x < (vector){0} + __builtin_inff()); /* infinity and NaN */
    vector m = (vector)((bits & 0x7fffff) | 0x3f000000); /* in [1/2, 1) */
    const whole low = m < (vector){0} + 0.707106781186547524f;
    const vector n = __builtin_convertvector((bits >> 23) - 126 + low, vector);
    m = m + (vector)((whole)m & low) - 1;
    const vector square = m * m;
    vector y = (vector){0} + 7.0376836292e-2f;
    y = y * m - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * square - n * 2.12194440e-4f - square * 0.5f;
    y = m + y + n * 0.693359375f;
    y = chosen(small, (vector){0} - __builtin_inff(), y);
    y = chosen(negative, (vector){0} + __builtin_nanf(""), y);
    return chosen(beyond, x, y);
}
#endif

INLINE vector magnitude(vector x)
{
    const whole negative = (whole)(x < (vector){0});
    return (vector)(((whole)x & ~negative) | ((whole)-x & negative));
}

/* log(1 + x) for x >= 0: what rounding took from 1 + x, log(u) x / (u - 1) gives back. */
INLINE vector logarithm_above_one(vector x)
{
    const vector u = x + 1, above = u - 1;
    const whole none = (whole)(above == (vector){0});
    const vector some = logarithm(u) * (x / (above + (vector)((whole)((vector){0} + 1) & none)));
    return (vector)(((whole)x & none) | ((whole)some & ~none));
}

INLINE vector softplus(vector x)
{
    const whole positive = (whole)(x > (vector){0});
    return (vector)((whole)x & positive) + logarithm_above_one(exponential(-magnitude(x)));
}

INLINE vector logsigmoid(vector x)
{
    return -softplus(-x);
}

INLINE vector sigmoid(vector x)
{
    return 1 / (1 + exponential(-x));
}

#define log logarithm
