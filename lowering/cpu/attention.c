/* Small calls of latent attention on a CPU: a step over a short cache, or a short prompt. See attention_rows.py for the
 * equations; o and lse of the keys alone, a query that sees nothing gives 0 and +inf.
 *
 * Calls this small are ready before torch has started three operators, so this is one function. It reads tensors as
 * they lie, copies what products read as vectors into rows of its own, turned where that makes rows of them, and computes
 * in fp32. A task is a batch entry and some of its heads, which depends on nothing of the machine: the bits do not either.
 *
 *     expanded   keys [N + D, S] of a head and values [S, V] are products of the latent, made once
 *     absorbed   keys [R + D, S] are the latent, turned, for all heads; values are the latent itself
 */

enum {
    TILE = 8, /* queries at a time, at most */
    FEW = 2,  /* tokens whose keys and values are made row by row of the weights */
};

/* Packed by small_attention.py in this order. */
struct problem {
    struct operand q, q_rope, latent, k_rope, w_uk, w_uv, mask, sinks; /* all but q and latent may be null */
    void *out;                                                        /* [B, T, H, V] */
    float *lse;                                                       /* [B, H, T] */
    int64_t out_kind, batch, tokens, cached, heads, nope, rope, rank, value;
    int64_t absorbed, causal, share, poison; /* share: heads of a task; poison: fill memory with NaN first */
    double scale;
    divide *divide;
    int64_t tasks, failed; /* failed: set where there is no memory */
};

/* [rows, columns] from ``place`` into rows of ``padded``. */
static void read_all(
    const struct operand *x, int64_t place, int64_t row, int64_t column, int64_t rows, int64_t columns, float *to,
    int64_t padded)
{
    for (int64_t r = 0; r < rows; r++)
        read(x, place + r * row, column, columns, to + r * padded, padded);
}

INLINE void tile(
    const int rows, const int columns, int64_t depth, const float *a, int64_t a_row, const float *b, int64_t b_row,
    float *to, int64_t row)
{
    vector sums[TILE][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            sums[r][c] = (vector){0};
    for (int64_t i = 0; i < depth; i++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sums[r][c] += a[r * a_row + i] * *(const loose *)(b + i * b_row + c * LANES);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            *(vector *)(to + r * row + c * LANES) = sums[r][c];
}

INLINE void strip(
    const int rows, int64_t width, int64_t depth, const float *a, int64_t a_row, const float *b, int64_t b_row, float *to,
    int64_t row)
{
    int64_t c = 0;
    for (; c + COLUMNS * LANES <= width; c += COLUMNS * LANES)
        tile(rows, COLUMNS, depth, a, a_row, b + c, b_row, to + c, row);
    for (; c < width; c += LANES)
        tile(rows, 1, depth, a, a_row, b + c, b_row, to + c, row);
}

/* to = A B; A [rows, depth] element by element, B [depth, width] and ``to`` in whole vectors. */
static void multiply(
    int64_t rows, int64_t width, int64_t depth, const float *a, int64_t a_row, const float *b, int64_t b_row, float *to,
    int64_t row)
{
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8)
        strip(8, width, depth, a + r * a_row, a_row, b, b_row, to + r * row, row);
    for (; r + 4 <= rows; r += 4)
        strip(4, width, depth, a + r * a_row, a_row, b, b_row, to + r * row, row);
    for (; r + 2 <= rows; r += 2)
        strip(2, width, depth, a + r * a_row, a_row, b, b_row, to + r * row, row);
    for (; r < rows; r++)
        strip(1, width, depth, a + r * a_row, a_row, b, b_row, to + r * row, row);
}

/* log(x) of a positive normal number, by the series of artanh. */
static double precise_logarithm(double x)
{
    union {
        double value;
        uint64_t bits;
    } m = {x};
    int64_t exponent = (int64_t)(m.bits >> 52) - 1023;
    m.bits = (m.bits & 0xfffffffffffffULL) | 0x3ff0000000000000ULL;
    if (m.value > 1.4142135623730951)
        m.value /= 2, exponent++;
    const double s = (m.value - 1) / (m.value + 1), square = s * s;
    double sum = 0;
    for (int i = 15; i > 0; i -= 2)
        sum = sum * square + 1.0 / i;
    return 2 * s * sum + exponent * 0.69314718055994531;
}

/* Add a row of the mask to scores. */
static void add_mask(const struct operand *mask, int64_t place, int64_t count, float *scores)
{
    const int64_t step = mask->stride[3];
    if (mask->kind == BOOL) {
        const uint8_t *seen = (const uint8_t *)mask->data + place;
        for (int64_t i = 0; i < count; i++)
            scores[i] = seen[i * step] ? scores[i] : -__builtin_inff();
    } else if (mask->kind == FLOAT && step == 1) {
        const float *row = (const float *)mask->data + place;
        for (int64_t i = 0; i < count; i++)
            scores[i] += row[i];
    } else {
        for (int64_t i = 0; i < count; i++)
            scores[i] += element(mask, place + i * step);
    }
}

/* exp(scores - max) in the scores' place, padded with zeros: max and sum. A row that is hidden whole has sum 0. */
static void soften(float *scores, int64_t count, int64_t padded, float *largest, float *sum_of)
{
    vector most = (vector){0} - __builtin_inff(), total = {0};
    for (int64_t i = count; i < padded; i++)
        scores[i] = -__builtin_inff();
    for (int64_t i = 0; i < padded; i += LANES) {
        const vector x = *(const vector *)(scores + i);
        const whole more = x > most;
        most = (vector)(((whole)x & more) | ((whole)most & ~more));
    }
    float m = most[0];
    for (int i = 1; i < LANES; i++)
        m = most[i] > m ? most[i] : m;
    *largest = m;
    if (m == -__builtin_inff()) { /* nothing is seen, or what is seen is NaN */
        float strange = 0;
        for (int64_t i = 0; i < count; i++)
            strange += scores[i] != scores[i] ? scores[i] : 0;
        for (int64_t i = 0; i < padded; i++)
            scores[i] = 0;
        *sum_of = strange;
        return;
    }
    for (int64_t i = 0; i < padded; i += LANES) {
        const vector p = exponential(*(const vector *)(scores + i) - m);
        *(vector *)(scores + i) = p;
        total += p;
    }
    *sum_of = sum(total);
}

INLINE void dots_of(
    const int rows, const int columns, int64_t depth, const float *a, int64_t a_row, const float *b, int64_t b_row,
    float *to, int64_t row, int64_t column)
{
    vector sums[4][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            sums[r][c] = (vector){0};
    for (int64_t i = 0; i < depth; i += LANES)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            const vector x = *(const loose *)(b + c * b_row + i);
            for (int r = 0; r < rows; r++)
                sums[r][c] += *(const loose *)(a + r * a_row + i) * x;
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            to[r * row + c * column] = sum(sums[r][c]);
}

/* to[r, c] = the dot product of rows r of A and c of B, whose ``depth`` is whole vectors. */
static void dots(
    int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, const float *b, int64_t b_row, float *to,
    int64_t row, int64_t column)
{
    for (int64_t c = 0; c < columns; c += 4) {
        const float *some = b + c * b_row;
        float *here = to + c * column;
        int64_t r = 0;
        if (c + 4 > columns) {
            for (; r < rows; r++)
                for (int64_t rest = c; rest < columns; rest++)
                    dots_of(1, 1, depth, a + r * a_row, a_row, b + rest * b_row, b_row, to + r * row + rest * column, row, column);
            return;
        }
        for (; r + 4 <= rows; r += 4)
            dots_of(4, 4, depth, a + r * a_row, a_row, some, b_row, here + r * row, row, column);
        for (; r < rows; r++)
            dots_of(1, 4, depth, a + r * a_row, a_row, some, b_row, here + r * row, row, column);
    }
}

/* [rows, columns], padded to whole vectors, turned. */
static void turned_to(const float *from, int64_t from_row, int64_t rows, int64_t columns, float *to, int64_t to_row)
{
    transpose(from, from_row, in_vectors(rows), in_vectors(columns), to, to_row);
}

/* Rows of whole vectors: a tensor's own where they lie so. */
struct matrix_of {
    const float *data;
    int64_t row;
};

static struct matrix_of rows_of(
    const struct operand *x, int64_t place, int64_t row, int64_t column, int64_t rows, int64_t columns, float *memory)
{
    const int64_t padded = in_vectors(columns);
    if (x->kind == FLOAT && column == 1 && padded == columns)
        return (struct matrix_of){(const float *)x->data + place, row};
    read_all(x, place, row, column, rows, columns, memory, padded);
    return (struct matrix_of){memory, padded};
}

struct places {
    float *keys, *turned, *values, *columns, *latent, *weight_k, *weight_v, *q, *queries, *scores, *context, *out;
    struct matrix_of tokens, w_uk, w_uv; /* the latent, and a head's weights */
};

/* Where everything lies behind ``memory``, and how many elements that is. */
static int64_t places(const struct problem *p, float *memory, struct places *of)
{
    const int64_t cached = in_vectors(p->cached), value = in_vectors(p->value), rank = in_vectors(p->rank);
    const int64_t nope = in_vectors(p->nope), depth = in_vectors((p->absorbed ? p->rank : p->nope) + p->rope);
    const int64_t widest = value > rank ? value : rank;
    float *at = memory;
#define PLACE(name, elements) of->name = at, at += (elements)
    PLACE(keys, (p->rank + p->nope + p->rope) * cached);
    PLACE(turned, p->absorbed ? 0 : p->rank * cached);
    PLACE(values, p->absorbed ? 0 : cached * value);
    PLACE(columns, p->absorbed ? 0 : cached * value);
    PLACE(latent, cached * rank);
    PLACE(weight_k, p->nope * rank);
    PLACE(weight_v, p->value * rank);
    PLACE(q, p->tokens * nope);
    PLACE(queries, p->tokens * (depth + rank));
    PLACE(scores, TILE * cached);
    PLACE(context, TILE * widest);
    PLACE(out, TILE * widest);
#undef PLACE
    return at - memory;
}

/* A head's weights: w_uk [N, R] and w_uv [V, R]. */
static void read_weights(const struct problem *p, int64_t head, struct places *at)
{
    const struct operand *k = &p->w_uk, *v = &p->w_uv;
    if (!k->data)
        return;
    at->w_uk = rows_of(k, head * k->stride[0], k->stride[1], k->stride[2], p->nope, p->rank, at->weight_k);
    at->w_uv = rows_of(v, head * v->stride[0], v->stride[1], v->stride[2], p->value, p->rank, at->weight_v);
}

/* Keys [N, S] and values [S, V] of a head: products with the latent, row by row for a few tokens. */
static void expand(const struct problem *p, const struct places *at)
{
    const int64_t rank = in_vectors(p->rank), value = in_vectors(p->value), cached = in_vectors(p->cached);
    const struct matrix_of *k = &at->w_uk, *v = &at->w_uv, *x = &at->tokens;
    if (p->cached <= FEW) {
        dots(p->nope, p->cached, rank, k->data, k->row, x->data, x->row, at->keys, cached, 1);
        dots(p->cached, p->value, rank, x->data, x->row, v->data, v->row, at->values, value, 1);
        for (int64_t s = 0; s < p->cached; s++)
            for (int64_t i = p->value; i < value; i++)
                at->values[s * value + i] = 0;
        for (int64_t i = 0; i < p->nope; i++)
            for (int64_t s = p->cached; s < cached; s++)
                at->keys[i * cached + s] = 0;
        return;
    }
    multiply(p->nope, cached, p->rank, k->data, k->row, at->turned, cached, at->keys, cached);
    multiply(p->value, cached, p->rank, v->data, v->row, at->turned, cached, at->columns, cached);
    turned_to(at->columns, cached, p->value, p->cached, at->values, value);
}

/* A head's queries, scaled, in rows of the keys' depth. */
static void read_queries(const struct problem *p, int64_t b, int64_t head, int64_t width, const struct places *at)
{
    const int64_t depth = in_vectors(width + p->rope) + in_vectors(p->rank), nope = in_vectors(p->nope);
    const struct operand *q = &p->q, *rope = &p->q_rope;
    const int64_t place = b * q->stride[0] + head * q->stride[2];
    const float scale = (float)p->scale;
    if (p->absorbed && p->w_uk.data) {
        read_all(q, place, q->stride[1], q->stride[3], p->tokens, p->nope, at->q, nope);
        multiply(p->tokens, in_vectors(p->rank), p->nope, at->q, nope, at->w_uk.data, at->w_uk.row, at->queries, depth);
    } else {
        read_all(q, place, q->stride[1], q->stride[3], p->tokens, width, at->queries, depth);
    }
    for (int64_t t = 0; t < p->tokens; t++) {
        float *row = at->queries + t * depth;
        if (rope->data)
            read(
                rope, b * rope->stride[0] + t * rope->stride[1] + head * rope->stride[2], rope->stride[3], p->rope,
                row + width, p->rope);
        for (int64_t i = 0; i < width + p->rope; i++)
            row[i] *= scale;
    }
}

/* Queries ``first`` to ``last`` of a head, at most TILE: they see keys up to the last one's own. */
static void attend(
    const struct problem *p, int64_t b, int64_t head, int64_t first, int64_t last, int64_t width,
    struct matrix_of values, const struct places *at)
{
    const int64_t depth = in_vectors(width + p->rope) + in_vectors(p->rank), cached = in_vectors(p->cached);
    const int64_t rows = last - first, value = in_vectors(p->value), wide = in_vectors(p->rank);
    const struct operand *mask = &p->mask;
    const int through = p->absorbed && p->w_uv.data != 0; /* the result is of the latent's width */
    int64_t reach = p->causal ? p->cached - p->tokens + last : p->cached;
    float factors[TILE];

    reach = reach < 0 ? 0 : reach;
    multiply(
        rows, in_vectors(reach), width + p->rope, at->queries + first * depth, depth, at->keys, cached, at->scores, cached);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t t = first + r, own = p->causal ? p->cached - p->tokens + t + 1 : p->cached;
        float *scores = at->scores + r * cached, largest, total;
        const int64_t seen = own < 0 ? 0 : own;
        if (mask->data)
            add_mask(
                mask, b * mask->stride[0] + head * mask->stride[1] + t * mask->stride[2], seen, scores);
        soften(scores, seen, in_vectors(reach), &largest, &total);
        factors[r] = total == 0 ? 0 : 1 / total;
        if (p->sinks.data && total > 0) {
            const float away = element(&p->sinks, head * p->sinks.stride[0]) - largest;
            /* exp(-|x|) stays finite: 1 / (sum + e^x), above 0 both divided by e^x */
            const float e = exponential((vector){0} - (away < 0 ? -away : away))[0];
            factors[r] = away > 0 ? e / (total * e + 1) : away == away ? 1 / (total + e) : away;
        }
        p->lse[(b * p->heads + head) * p->tokens + t] =
            total == 0 ? __builtin_inff() : total == total ? largest + (float)precise_logarithm(total) : total;
    }
    if (through) {
        multiply(rows, wide, reach, at->scores, cached, values.data, values.row, at->context, wide);
        dots(rows, p->value, wide, at->context, wide, at->w_uv.data, at->w_uv.row, at->out, value, 1);
    } else {
        multiply(rows, value, reach, at->scores, cached, values.data, values.row, at->out, value);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t place = ((b * p->tokens + first + r) * p->heads + head) * p->value;
        write(p->out, p->out_kind, place, 1, at->out + r * value, factors[r], p->value);
    }
}

/* The latent as columns, zeros behind the last token. */
static void turn_latent(const struct problem *p, const struct places *at, float *turned)
{
    const int64_t cached = in_vectors(p->cached);
    int64_t s = 0;
    for (; s + LANES <= p->cached; s += LANES)
        for (int64_t r = 0; r < in_vectors(p->rank); r += LANES) {
            vector square[LANES];
            for (int i = 0; i < LANES; i++)
                square[i] = *(const loose *)(at->tokens.data + (s + i) * at->tokens.row + r);
            turn(square);
            for (int i = 0; i < LANES && r + i < p->rank; i++)
                *(vector *)(turned + (r + i) * cached + s) = square[i];
        }
    for (int64_t r = 0; s < cached && r < p->rank; r++)
        for (int64_t i = s; i < cached; i++)
            turned[r * cached + i] = i < p->cached ? at->tokens.data[i * at->tokens.row + r] : 0;
}

static void run_heads(const struct problem *p, int64_t b, int64_t head, int64_t end, struct places *at)
{
    const int64_t value = in_vectors(p->value), cached = in_vectors(p->cached);
    const int64_t width = p->absorbed ? p->rank : p->nope;
    const struct operand *latent = &p->latent, *rope = &p->k_rope;
    float *turned = p->absorbed ? at->keys : at->turned;

    at->tokens = rows_of(
        latent, b * latent->stride[0], latent->stride[1], latent->stride[2], p->cached, p->rank, at->latent);
    if (p->absorbed || p->cached > FEW)
        turn_latent(p, at, turned);
    if (rope->data)
        read_all(
            rope, b * rope->stride[0], rope->stride[2], rope->stride[1], p->rope, p->cached, at->keys + width * cached,
            cached);
    for (; head < end; head++) {
        read_weights(p, head, at);
        if (!p->absorbed)
            expand(p, at);
        read_queries(p, b, head, width, at);
        for (int64_t t = 0; t < p->tokens; t += TILE) {
            const int64_t last = t + TILE < p->tokens ? t + TILE : p->tokens;
            const struct matrix_of own = {at->values, value};
            attend(p, b, head, t, last, width, p->absorbed ? at->tokens : own, at);
        }
    }
}

/* Tasks ``begin`` to ``end``. */
static void run_tasks(int64_t begin, int64_t end, void *context)
{
    struct problem *p = context;
    const int64_t shares = (p->heads + p->share - 1) / p->share;
    struct places at;
    const int64_t elements = places(p, (float *)0, &at);
    char *memory = __builtin_malloc(elements * sizeof(float) + VECTOR_BYTES);
    if (!memory) {
        p->failed = 1;
        return;
    }
    float *aligned = (float *)(memory + VECTOR_BYTES - (uintptr_t)memory % VECTOR_BYTES);
    for (int64_t i = 0; p->poison && i < elements; i++)
        aligned[i] = __builtin_nanf("");
    places(p, aligned, &at);
    for (int64_t i = begin; i < end; i++) {
        const int64_t head = i % shares * p->share, last = head + p->share;
        run_heads(p, i / shares, head, last < p->heads ? last : p->heads, &at);
    }
    __builtin_free(memory);
}

/* ``addresses``: of the operands and results, and whether memory is filled with NaN first. */
int64_t latent_attention(const struct problem *template, const int64_t *addresses)
{
    struct problem p = *template;
    struct operand *operands[] = {&p.q, &p.q_rope, &p.latent, &p.k_rope, &p.w_uk, &p.w_uv, &p.mask, &p.sinks};
    for (int i = 0; i < 8; i++)
        operands[i]->data = (const void *)addresses[i];
    p.out = (void *)addresses[8], p.lse = (float *)addresses[9], p.poison = addresses[10], p.failed = 0;
    const int64_t failed = shared_out(p.divide, p.tasks, 1, run_tasks, &p);
    return failed | p.failed;
}
