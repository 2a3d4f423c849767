/* Rows of vectors and their products, of which recurrence_backward.c is made: see there. */
#include <stdint.h>

typedef REAL real;

enum {
    LANES = VECTOR_BYTES / sizeof(real),
    TOKENS = 16, /* a multiple of LANES and of ROWS */
    ROWS = VECTOR_BYTES == 64 ? 8 : 4, /* of a block of a product; with COLUMNS as many sums as hide their latency */
    COLUMNS = 2,
    KEYS = 4,            /* that are decayed side by side */
    NARROW = 16,         /* bytes of the smallest register that every target has */
};

typedef real vector __attribute__((vector_size(VECTOR_BYTES)));
typedef real loose __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias)); /* at any address */
typedef real narrow __attribute__((vector_size(NARROW)));

/* A vector to memory past the caches, which need not read a line first that is written whole. */
#if defined(__clang__)
#define STREAM(to, x) __builtin_nontemporal_store(x, (vector *)(to))
#elif VECTOR_BYTES == 64
#define STREAM(to, x) __builtin_ia32_movntdq512((words *)(to), (words)(x))
#elif VECTOR_BYTES == 32
#define STREAM(to, x) __builtin_ia32_movntdq256((words *)(to), (words)(x))
#else
#define STREAM(to, x) (*(vector *)(to) = (x))
#endif
typedef long long words __attribute__((vector_size(VECTOR_BYTES)));

#define INLINE static inline __attribute__((always_inline))

INLINE real sum(vector x)
{
    const union {
        vector whole;
        narrow parts[VECTOR_BYTES / NARROW];
    } all = {x};
    narrow folded = all.parts[0];
    real total = 0;
    for (int i = 1; i < (int)(VECTOR_BYTES / NARROW); i++)
        folded += all.parts[i];
    for (int i = 0; i < (int)(NARROW / sizeof(real)); i++)
        total += folded[i];
    return total;
}

static real dot(const real *x, const real *y, int64_t count)
{
    vector sums = {0};
    for (int64_t i = 0; i < count; i += LANES)
        sums += *(const vector *)(x + i) * *(const vector *)(y + i);
    return sum(sums);
}

static real total(const real *x, int64_t count)
{
    vector sums = {0};
    for (int64_t i = 0; i < count; i += LANES)
        sums += *(const vector *)(x + i);
    return sum(sums);
}

/* y += factor x */
static void add(real *y, real factor, const real *x, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES)
        *(vector *)(y + i) += factor * *(const vector *)(x + i);
}

/* A matrix A[row, step], element by element, and one whose rows are read as vectors. */
struct matrix {
    const real *data;
    int64_t row, step;
};

INLINE void block(
    const int columns, int64_t depth, struct matrix a, const real *b, int64_t b_row, const real *from, real *to,
    int64_t row, const real *keep)
{
    vector sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < columns; c++)
            sums[r][c] = keep ? keep[r] * *(const vector *)(from + r * row + c * LANES) : (vector){0};
    for (int64_t i = 0; i < depth; i++) {
        vector x[COLUMNS];
        for (int c = 0; c < columns; c++)
            x[c] = *(const vector *)(b + i * b_row + c * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < columns; c++)
                sums[r][c] += a.data[r * a.row + i * a.step] * x[c];
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < columns; c++)
            *(vector *)(to + r * row + c * LANES) = sums[r][c];
}

/* to = diag(keep) from + A B, or A B without ``keep``; A [rows, depth], B [depth, width], the others' rows ``row`` apart. */
static void product(
    int64_t rows, int64_t width, int64_t depth, struct matrix a, const real *b, int64_t b_row, const real *keep,
    const real *from, real *to, int64_t row)
{
    for (int64_t c = 0; c < width; c += COLUMNS * LANES)
        for (int64_t r = 0; r < rows; r += ROWS) {
            const struct matrix part = {a.data + r * a.row, a.row, a.step};
            const int64_t place = r * row + c;
            if (c + COLUMNS * LANES <= width)
                block(COLUMNS, depth, part, b + c, b_row, from + place, to + place, row, keep ? keep + r : 0);
            else
                block(1, depth, part, b + c, b_row, from + place, to + place, row, keep ? keep + r : 0);
        }
}

/* A square of LANES rows, turned: every round interleaves the first half of the rows with the second. */
INLINE void turn(vector x[LANES])
{
#ifdef __clang__ /* it has no shuffle whose order is a vector */
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const real upper = x[j][i];
            x[j][i] = x[i][j], x[i][j] = upper;
        }
#else
    typedef __typeof__((vector){0} < (vector){0}) order;
    order low, high;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        low[i] = i / 2 + i % 2 * LANES, high[i] = low[i] + LANES / 2;
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
        vector y[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = __builtin_shuffle(x[i], x[i + LANES / 2], low);
            y[2 * i + 1] = __builtin_shuffle(x[i], x[i + LANES / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            x[i] = y[i];
    }
#endif
}

/* [rows, columns] to [columns, rows], both multiples of TOKENS. */
static void transpose(const real *from, int64_t from_row, int64_t rows, int64_t columns, real *to, int64_t to_row)
{
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = 0; c < columns; c += LANES) {
            vector x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                x[i] = *(const vector *)(from + (r + i) * from_row + c);
            turn(x);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                *(vector *)(to + (c + i) * to_row + r) = x[i];
        }
}

/* y = factor x; both aligned and padded, as in the functions above. */
static void scale(real *y, real factor, const real *x, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES)
        *(vector *)(y + i) = factor * *(const vector *)(x + i);
}

static void fill(real *to, real value, int64_t count)
{
    for (int64_t i = 0; i < count; i += LANES)
        *(vector *)(to + i) = (vector){0} + value;
}

/* A row of memory, times a factor, into one of ``padded`` elements; that ``ahead`` of it will be read soon. */
static void read_row(const real *from, real factor, int64_t count, real *to, int64_t padded, int64_t ahead)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        *(vector *)(to + i) = factor * *(const loose *)(from + i);
        if (i * sizeof(real) % 64 == 0)
            __builtin_prefetch((const void *)((uintptr_t)(from + i) + ahead * sizeof(real)));
    }
    for (; i < padded; i++)
        to[i] = i < count ? factor * from[i] : (real)0;
}

/* A row to memory, times a factor; ``seen`` becomes NaN where it is not finite. */
static void write_row(const real *from, real factor, int64_t count, real *to, vector *seen)
{
    const int streams = (uintptr_t)to % VECTOR_BYTES == 0;
    vector bad = *seen;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vector x = factor * *(const vector *)(from + i);
        bad += x * 0;
        if (streams)
            STREAM(to + i, x);
        else
            *(loose *)(to + i) = x;
    }
    for (; i < count; i++)
        to[i] = factor * from[i], bad += to[i] * 0;
    *seen = bad;
}
