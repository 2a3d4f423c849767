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

/* A strip of a state: rows of WIDTH, which may lie further apart. */
struct strip {
    real *data;
    int64_t row;
};

static const loose *row_of(const struct strip *x, int64_t i)
{
    return (const loose *)(x->data + i * x->row);
}

/* What the state holds for a key: S^T key. */
static void recall(struct strip state, const real *key, int64_t K, vector known[VECTORS])
{
    vector sums[AT_ONCE][VECTORS] = {{{0}}};
    for (int64_t i = 0; i < K; i += AT_ONCE)
        for (int r = 0; r < AT_ONCE; r++)
            for (int j = 0; j < VECTORS; j++)
                sums[r][j] += key[i + r] * row_of(&state, i + r)[j];
    for (int j = 0; j < VECTORS; j++)
        known[j] = (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
}

/* Decay the state, write u into it under the key, and read it with the query. */
static void update(
    struct strip state, struct strip new, const real *decay, const real *key, const real *query, int64_t K,
    const vector u[VECTORS], vector out[VECTORS])
{
    vector sums[AT_ONCE][VECTORS] = {{{0}}};
    for (int64_t i = 0; i < K; i += AT_ONCE)
        for (int r = 0; r < AT_ONCE; r++)
            for (int j = 0; j < VECTORS; j++) {
                const vector next = decay[i + r] * row_of(&state, i + r)[j] + key[i + r] * u[j];
                ((loose *)row_of(&new, i + r))[j] = next;
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

static int lies_in_rows(const struct operand *x)
{
    return x->data && x->kind == OWN && x->stride[3] == 1;
}

/* Whether a state has its keys side by side, as Mamba-2's: squares of it are turned then. */
static int lies_turned(const struct operand *x, int64_t K)
{
    return x->kind == OWN && x->stride[2] == 1 && x->stride[3] != 1 && K % LANES == 0;
}

static void read_state(const struct operand *x, int64_t place, int64_t K, int64_t columns, vector (*state)[VECTORS])
{
    if (!lies_turned(x, K)) {
        for (int64_t i = 0; i < K; i++)
            read_strip(x, place + i * x->stride[2], x->stride[3], state[i], columns);
        return;
    }
    for (int64_t i = 0; i < K; i += LANES)
        for (int j = 0; j < VECTORS; j++) {
            vector square[LANES];
            for (int r = 0; r < LANES; r++) {
                const int64_t column = j * LANES + r;
                const real *row = (const real *)x->data + place + column * x->stride[3] + i;
                square[r] = column < columns ? (vector)*(const loose *)row : (vector){0};
            }
            turn(square);
            for (int r = 0; r < LANES; r++)
                state[i + r][j] = square[r];
        }
}

static void write_state(vector (*state)[VECTORS], const struct operand *x, int64_t place, int64_t K, int64_t columns)
{
    if (!lies_turned(x, K)) {
        for (int64_t i = 0; i < K; i++)
            write_strip(state[i], 1, x, place + i * x->stride[2], x->stride[3], columns);
        return;
    }
    for (int64_t i = 0; i < K; i += LANES)
        for (int j = 0; j < VECTORS; j++) {
            vector square[LANES];
            for (int r = 0; r < LANES; r++)
                square[r] = state[i + r][j];
            turn(square);
            for (int r = 0; r < LANES && j * LANES + r < columns; r++)
                *(loose *)((real *)x->data + place + (j * LANES + r) * x->stride[3] + i) = square[r];
        }
}

/* A state with its keys side by side, and one token's rows. */
struct turned {
    const real *from;
    real *to;
    int64_t from_row, to_row;
    const real *decay, *key, *key_decayed, *query; /* key_decayed: null without the delta term */
};

/* One token, a row of keys for each of ``columns`` values: what is written of u, and out. */
static void step_turned(
    const struct turned *s, int64_t K, int64_t columns, real recalled, real written, const real *u, real *out)
{
    for (int64_t v = 0; v < columns; v += AT_ONCE) {
        const int count = columns - v < AT_ONCE ? (int)(columns - v) : AT_ONCE;
        vector known[AT_ONCE] = {{0}}, sums[AT_ONCE] = {{0}};
        const real *rows[AT_ONCE];
        real own[AT_ONCE];
        for (int r = 0; r < AT_ONCE; r++)
            rows[r] = s->from + (v + (r < count ? r : 0)) * s->from_row;
        for (int64_t i = 0; s->key_decayed && i < K; i += LANES)
            for (int r = 0; r < AT_ONCE; r++)
                known[r] += *(const loose *)(s->key_decayed + i) * *(const loose *)(rows[r] + i);
        for (int r = 0; r < AT_ONCE; r++)
            own[r] = (u[v + r] - recalled * sum(known[r])) * written;
        for (int64_t i = 0; i < K; i += LANES) {
            const vector decay = *(const loose *)(s->decay + i), key = *(const loose *)(s->key + i);
            const vector query = *(const loose *)(s->query + i);
            for (int r = 0; r < AT_ONCE; r++) {
                const vector next = decay * *(const loose *)(rows[r] + i) + key * own[r];
                sums[r] += query * next;
                if (r < count)
                    *(loose *)(s->to + (v + r) * s->to_row + i) = next;
            }
        }
        for (int r = 0; r < AT_ONCE; r++)
            out[v + r] = sum(sums[r]);
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
    const int64_t from = slot * before[0] + head * before[1] + column * before[3];
    const int64_t to = slot * after[0] + head * after[1] + column * after[3];
    /* one token goes from memory to memory */
    const int one = end - start == 1 && p->initial.data;
    const int direct = one && columns == WIDTH && lies_in_rows(&p->initial) && lies_in_rows(&p->final);
    const int turned = one && lies_turned(&p->initial, p->K) && lies_turned(&p->final, p->K);
    vector u[VECTORS], out[VECTORS] = {{0}}, state[direct || turned ? 1 : p->K][VECTORS];
    real *memory = (real *)p->initial.data + from, *final = (real *)p->final.data + to;
    const struct strip old = direct ? (struct strip){memory, before[2]} : (struct strip){(real *)state, WIDTH};
    const struct strip new = direct ? (struct strip){final, after[2]} : old;
    real same_decay[p->K], key_decayed[p->K];

    if (slot < 0) { /* a request that is skipped */
        for (int64_t t = start; t < end; t++)
            write_strip(out, 1, &p->out, place + t * row[1], row[3], columns);
        return;
    }
    for (int64_t i = 0; i < p->K; i++)
        same_decay[i] = 1;
    if (!direct && !turned && p->initial.data)
        read_state(&p->initial, from, p->K, columns, state);
    else if (!p->initial.data)
        for (int64_t i = 0; i < p->K; i++)
            for (int j = 0; j < VECTORS; j++)
                state[i][j] = (vector){0};
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
        for (int64_t i = 0; p->delta && i < p->K; i++)
            key_decayed[i] = key[i] * decay[i];
        if (turned) {
            const struct turned step = {
                memory, final, before[3], after[3], decay, key, p->delta ? key_decayed : 0, query};
            step_turned(&step, p->K, columns, key_factor, key_factor * beta, (const real *)u, (real *)out);
            write_strip(out, query_factor, &p->out, place + t * row[1], row[3], columns);
            return;
        }
        if (p->delta) {
            vector known[VECTORS];
            recall(old, key_decayed, p->K, known);
            for (int j = 0; j < VECTORS; j++)
                u[j] -= key_factor * known[j];
        }
        for (int j = 0; j < VECTORS; j++)
            u[j] *= key_factor * beta;
        update(old, new, decay, key, query, p->K, u, out);
        write_strip(out, query_factor, &p->out, place + t * row[1], row[3], columns);
    }
    if (!direct)
        write_state(state, &p->final, to, p->K, columns);
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
