/* The token recurrence of the linear-attention family on a CPU.
 *
 * Per sequence and value head, with decay factors a_t in [0, 1] (1 without a gate):
 *
 *     u_t = beta_t (v_t - S_{t-1}^T (a_t * k_t))        without the delta term: u_t = beta_t v_t
 *     S_t = diag(a_t) S_{t-1} + k_t u_t^T
 *     o_t = scale S_t^T q_t
 *
 * where q and k may first be normalised, x / sqrt(sum(x * x) + eps): a factor on u and o, and on what is recalled.
 *
 * A value column never reads another, so the state is cut into strips of columns that stay in the first-level cache for
 * the whole sequence: every token takes two passes over a strip, and the only memory traffic is the operands. A CPU has
 * no matrix unit for which the products of the chunked form would pay; the recurrence needs fewer operations and no
 * scratch memory, and is exact for any gate.
 *
 * Operands are read as a model has them: any floating dtype and strides, the gates' function and their parameters, beta
 * before its sigmoid. What does not lie as the recurrence reads it is made once, before: rows of a token at a time.
 *
 * Compiled with -DREAL=float or double, -DVECTOR_BYTES (a register) and -DVECTORS (registers to a strip's row, as many as
 * leave room for the sums), after vectors.c, functions.c, operands.c and the gates' functions, of gates.py. Only stdint.h
 * is included, so compiling takes about a second.
 */
enum {
    AHEAD = 4,    /* tokens */
    AT_ONCE = 4,  /* rows of the state, K is a multiple: enough sums to hide the latency of adding */
    WIDTH = VECTORS * VECTOR_BYTES / sizeof(real),
};

/* Rows [B, T, H, columns] as they are computed with: strides in elements, the last dimension contiguous. */
struct rows {
    const real *data;
    int64_t batch, token, head;
};

/* Packed by recurrence.py in this order, but for the addresses that every call has of its own. */
struct problem {
    struct operand q, k, v;             /* [B, T, H or heads, K or V] */
    struct operand g;                   /* [heads], [B, T, heads] or [B, T, heads, K], or null */
    struct operand beta;                /* [B, T, heads], or null */
    struct operand initial;             /* [sequences, heads, K, V], or null: zeros */
    struct operand A_log, dt_bias;      /* [heads], and [heads] or [heads, K], or null */
    struct operand out;                 /* [B, T, heads, V] */
    struct operand final;               /* [sequences, heads, K, V], may be the initial state's memory */
    const int64_t *bounds;              /* [sequences + 1] of packed sequences, or null: one to a batch entry */
    const int64_t *slots;               /* [sequences], where in initial and final its state is, or null: in order */
    int64_t batch, length, sequences, heads, heads_per_key, K, V;
    int64_t gate, function, sigmoid_beta, delta; /* function: of the gates, -1 if g is the factor itself */
    double gate_scale, scale, norm_eps; /* norm_eps 0: q and k are taken as they are */
    divide *divide;
};
enum { NO_GATE, PER_HEAD, PER_TOKEN, PER_CHANNEL };

/* A call: the operands as they are computed with, in its own memory where they do not lie so. */
struct call {
    const struct problem *p;
    struct rows q, k, v, decay, beta;
    real *own_q, *own_k, *own_v, *own_decay, *own_beta; /* where rows are made, or null */
    real *rate, *bias;
    int64_t gates, deep, wide; /* a token's gates, K and V, in whole vectors */
};

static const real *at(const struct rows *x, int64_t batch, int64_t token, int64_t head)
{
    return x->data + batch * x->batch + token * x->token + head * x->head;
}

/* A row that will be read soon: one in a page of its own is not foreseen by the machine. */
static void prefetch(const real *row, int64_t count)
{
    for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof(real))
        __builtin_prefetch(row + i);
}

/* 1 / sqrt(sum(x * x) + eps), or 1 if eps is 0. */
static real inverse_norm(const real *x, int64_t K, double eps)
{
    enum { SUMS = 16 };
    real sums[SUMS] = {0}, sum = (real)eps;
    int64_t i = 0;
    if (eps == 0)
        return 1;
    for (; i + SUMS <= K; i += SUMS)
        for (int r = 0; r < SUMS; r++)
            sums[r] += x[i + r] * x[i + r];
    for (; i < K; i++)
        sums[0] += x[i] * x[i];
    for (int r = 0; r < SUMS; r++)
        sum += sums[r];
    return (real)(1 / __builtin_sqrt((double)sum));
}

/* What the state holds for a key: S^T key. */
static void recall(vector (*state)[VECTORS], const real *key, int64_t K, vector known[VECTORS])
{
    vector sums[AT_ONCE][VECTORS] = {{{0}}};
    for (int64_t i = 0; i < K; i += AT_ONCE)
        for (int r = 0; r < AT_ONCE; r++)
            for (int j = 0; j < VECTORS; j++)
                sums[r][j] += key[i + r] * state[i + r][j];
    for (int j = 0; j < VECTORS; j++)
        known[j] = (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
}

/* Decay the state, write u into it under the key, and read it with the query. */
static void update(
    vector (*state)[VECTORS], const real *decay, const real *key, const real *query, int64_t K,
    const vector u[VECTORS], vector out[VECTORS])
{
    vector sums[AT_ONCE][VECTORS] = {{{0}}};
    for (int64_t i = 0; i < K; i += AT_ONCE)
        for (int r = 0; r < AT_ONCE; r++)
            for (int j = 0; j < VECTORS; j++) {
                const vector next = decay[i + r] * state[i + r][j] + key[i + r] * u[j];
                state[i + r][j] = next;
                sums[r][j] += query[i + r] * next;
            }
    for (int j = 0; j < VECTORS; j++)
        out[j] = (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
}

/* A row of a strip from and to memory, where only the first ``columns`` may exist. */
INLINE void read_strip(const struct operand *x, int64_t place, int64_t step, vector to[VECTORS], int64_t columns)
{
    if (columns == WIDTH && step == 1 && x->kind == OWN) {
        for (int j = 0; j < VECTORS; j++)
            to[j] = ((const loose *)((const real *)x->data + place))[j];
    } else {
        read(x, place, step, columns, (real *)to, WIDTH);
    }
}

INLINE void write_strip(
    const vector from[VECTORS], real factor, const struct operand *x, int64_t place, int64_t step, int64_t columns)
{
    if (columns == WIDTH && step == 1 && x->kind == OWN) {
        for (int j = 0; j < VECTORS; j++)
            ((loose *)((real *)x->data + place))[j] = from[j] * factor;
    } else {
        write((void *)x->data, x->kind, place, step, (const real *)from, factor, columns);
    }
}

/* One strip of one head of one sequence, from its initial to its final state. */
static void run_strip(const struct call *c, int64_t sequence, int64_t head, int64_t column)
{
    const struct problem *p = c->p;
    const int64_t columns = p->V - column < WIDTH ? p->V - column : WIDTH;
    const int64_t slot = p->slots ? p->slots[sequence] : sequence;
    const int64_t batch = p->bounds ? 0 : sequence;
    const int64_t start = p->bounds ? p->bounds[sequence] : 0;
    const int64_t end = p->bounds ? p->bounds[sequence + 1] : p->length;
    const int64_t *before = p->initial.stride, *after = p->final.stride, *row = p->out.stride;
    const int64_t place = batch * row[0] + head * row[2] + column * row[3];
    vector state[p->K][VECTORS], u[VECTORS], out[VECTORS] = {{0}};
    real same_decay[p->K], key_decayed[p->K];

    if (slot < 0) { /* a request that is skipped */
        for (int64_t t = start; t < end; t++)
            write_strip(out, 1, &p->out, place + t * row[1], row[3], columns);
        return;
    }
    for (int64_t i = 0; i < p->K; i++) {
        if (p->initial.data)
            read_strip(
                &p->initial, slot * before[0] + head * before[1] + i * before[2] + column * before[3], before[3], state[i],
                columns);
        else
            for (int j = 0; j < VECTORS; j++)
                state[i][j] = (vector){0};
        same_decay[i] = 1;
    }
    for (int64_t t = start; t < end; t++) {
        const real *query = at(&c->q, batch, t, head / p->heads_per_key);
        const real *key = at(&c->k, batch, t, head / p->heads_per_key);
        const real *value = at(&c->v, batch, t, head) + column;
        const real *decay = c->decay.data ? at(&c->decay, batch, t, head) : same_decay;
        const real beta = c->beta.data ? *at(&c->beta, batch, t, head) : (real)1;
        const real query_factor = (real)p->scale * inverse_norm(query, p->K, p->norm_eps);
        const real key_factor = inverse_norm(key, p->K, p->norm_eps);

        if (t + AHEAD < end) {
            prefetch(query + AHEAD * c->q.token, p->K);
            prefetch(key + AHEAD * c->k.token, p->K);
            if (p->gate == PER_CHANNEL)
                prefetch(decay + AHEAD * c->decay.token, p->K);
            prefetch(value + AHEAD * c->v.token, columns);
        }
        if (c->decay.data && p->gate != PER_CHANNEL) {
            for (int64_t i = 0; i < p->K; i++)
                same_decay[i] = *decay;
            decay = same_decay;
        }
        if (columns == WIDTH)
            for (int j = 0; j < VECTORS; j++)
                u[j] = ((const loose *)value)[j];
        else
            for (int64_t i = 0; i < WIDTH; i++)
                ((real *)u)[i] = i < columns ? value[i] : (real)0;
        if (p->delta) {
            vector known[VECTORS];
            for (int64_t i = 0; i < p->K; i++)
                key_decayed[i] = key[i] * decay[i];
            recall(state, key_decayed, p->K, known);
            for (int j = 0; j < VECTORS; j++)
                u[j] -= key_factor * known[j];
        }
        for (int j = 0; j < VECTORS; j++)
            u[j] *= key_factor * beta;
        update(state, decay, key, query, p->K, u, out);
        write_strip(out, query_factor, &p->out, place + t * row[1], row[3], columns);
    }
    for (int64_t i = 0; i < p->K; i++)
        write_strip(
            state[i], 1, &p->final, slot * after[0] + head * after[1] + i * after[2] + column * after[3], after[3],
            columns);
}

/* Tasks ``begin`` to ``end``, a task being a (sequence, head, strip). */
static void run_strips(int64_t begin, int64_t end, void *context)
{
    const struct call *c = context;
    const int64_t strips = (c->p->V + WIDTH - 1) / WIDTH;
    for (int64_t i = begin; i < end; i++) {
        const int64_t lane = i / strips;
        run_strip(c, lane / c->p->heads, lane % c->p->heads, i % strips * WIDTH);
    }
}
