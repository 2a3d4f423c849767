/* Gradients of the recurrence on a CPU, in chunks: the equations are those of lowering/adjoint.py.
 *
 * A chunk is TOKENS tokens of one sequence and value head, padded with tokens that change nothing. A first walk computes
 * the states between chunks and, of each chunk, P, L and W, with V' = beta W; a second one goes backwards with dS. Of the
 * states only every GROUP-th is kept. Where a sequence has more chunks than are, only every ``kept``-th state is, and all
 * of a chunk is computed again.
 *
 * Decays are factors a_t in [0, 1] and only ever multiplied: a factor of 0 is exact, and so is its gradient. With
 * before_t = a_1 .. a_t, after_t = a_{t+1} .. a_C, S before the chunk and dS' behind it, what follows from the gradients
 * of Q_g, -K_g and K_d (dQ, dM, dD below) is
 *
 *     dq_t = before_t dQ_t       dk_t = after_t dD_t - before_t dM_t
 *     da_t = before_{t-1} X_t + after_t Y_t       X_t = q_t dQ_t - k_t dM_t + a_{t+1} X_{t+1}
 *                                                 Y_{t+1} = k_t dD_t + a_t Y_t,   Y_1 = rowsum(S * dS')
 *
 * and of a pair (i, j) inside the chunk, with k_j decayed step by step from j to i, the derivative of that walk.
 *
 * Everything that grows with K V is one function, ``product``: vectors run along V, or along the tokens of a chunk where
 * the sum is over V. Compiled like recurrence.c. Only stdint.h is included.
 */

/* A tensor [B, T, H, columns]: strides in elements, the last dimension contiguous. */
struct operand {
    const real *data;
    int64_t batch, token, head;
};

/* Packed by backward.py in this order. */
struct problem {
    struct operand q, k, v, decay, beta, grad_out; /* decay (or its logarithm), beta and grad_out may be null */
    const real *initial, *grad_final;              /* [sequences, heads, K, V], or null: zeros */
    real *dq, *dk, *dv, *ddecay, *dbeta;           /* [parts, B, T, heads, K | V | 1]; no parts of dv */
    real *dinitial;                                /* [sequences, heads, K, V] */
    const int64_t *bounds;                         /* [sequences + 1] of packed sequences, or null */
    int64_t batch, length, heads, heads_per_key, K, V, parts, decay_per_channel, log_decay, delta;
    int64_t history;                               /* elements of what is kept of chunks between the walks, about */
    int64_t poison;                                /* whether memory begins as NaN, for tests */
    double scale, norm_eps;                        /* norm_eps 0: q and k are taken as they are */
    int64_t failed, strange;                       /* set where memory ran out, and where a gradient is not finite */
};

/* One task: the columns of V that a part has, of one head of one sequence. Rows of K are ``deep`` long in memory, rows
 * of V ``wide``: padded with zeros, and so that rows below each other do not meet in the cache. */
struct walk {
    const struct problem *p;
    int64_t sequence, head, batch, start, end, part, column, columns, K, V, deep, wide; /* K, V: multiples of TOKENS */
    int64_t first, count; /* the tokens of the chunk */
    int64_t ahead;        /* and how far from them the next ones are */
    /* Kept of a chunk between the walks: */
    real *q, *k, *a;                    /* [TOKENS, deep] */
    real *P, *L, *W;                    /* [TOKENS, TOKENS], 0 above the diagonal; [TOKENS, wide] */
    real *beta, *q_factor, *k_factor;   /* [TOKENS] */
    /* Computed again: */
    real *in, *out, *total;             /* Q_g and -K_g [2 TOKENS, deep], K_d [TOKENS, deep], exp(G_C) [deep] */
    real *values;                       /* V' [TOKENS, wide] */
    /* Gradients: */
    real *grads;                        /* dO, scaled, and b Z [2 TOKENS, wide] */
    real *grads_t, *values_t;           /* [V, 2 TOKENS], [V, TOKENS] */
    real *products, *products_t;        /* dQ, dM, dD: [K, 3 TOKENS], [3 TOKENS, deep] */
    real *pairs;                        /* dP and -dL [2 TOKENS, TOKENS] */
    real *overlap, *dS;                 /* rowsum(S * dS') [deep], [K, wide] */
    real *dq, *dk, *da, dbeta[TOKENS];  /* [TOKENS, deep] */
    vector seen;                        /* 0, or NaN since a gradient was not finite */
};

static const real *at(const struct operand *x, int64_t batch, int64_t token, int64_t head)
{
    return x->data + batch * x->batch + token * x->token + head * x->head;
}

/* 1 / sqrt(sum(x * x) + eps), or 1 if eps is 0; ``x`` is padded. */
static real inverse_norm(const real *x, int64_t K, double eps)
{
    return eps == 0 ? (real)1 : (real)(1 / __builtin_sqrt((double)dot(x, x, K) + eps));
}

/* A row of the chunk, normalised; the factor is returned. */
static real read_key(const struct walk *w, const struct operand *x, int64_t t, real *to)
{
    read_row(at(x, w->batch, w->first + t, w->head / w->p->heads_per_key), 1, w->p->K, to, w->K, w->ahead * x->token);
    const real factor = inverse_norm(to, w->K, w->p->norm_eps);
    scale(to, factor, to, w->K);
    return factor;
}

/* The factors of a token of the chunk. */
static void load_decay(const struct walk *w, int64_t t, real *a)
{
    const struct operand *x = &w->p->decay;
    const int each = w->p->decay_per_channel, live = t < w->count && x->data;
    const real *from = live ? at(x, w->batch, w->first + t, w->head) : 0;
    if (live && each)
        read_row(from, 1, w->p->K, a, w->K, w->ahead * x->token);
    else
        fill(a, live ? *from : (real)1, w->K);
    if (!live || !w->p->log_decay)
        return;
    for (int64_t i = 0; i < (each ? w->K : LANES); i += LANES)
        *(vector *)(a + i) = exponential(*(vector *)(a + i));
    if (!each)
        fill(a, a[0], w->K);
}

/* q, k, decays and beta of the chunk. */
static void load_keys(struct walk *w)
{
    const struct problem *p = w->p;
    const int64_t n = w->deep, first = w->first;
    for (int64_t t = 0; t < TOKENS; t++) {
        const int live = t < w->count;
        w->beta[t] = !live ? (real)0 : p->beta.data ? *at(&p->beta, w->batch, first + t, w->head) : (real)1;
        if (live) {
            w->q_factor[t] = read_key(w, &p->q, t, w->q + t * n);
            w->k_factor[t] = read_key(w, &p->k, t, w->k + t * n);
        } else {
            fill(w->q + t * n, 0, w->K);
            fill(w->k + t * n, 0, w->K);
        }
        load_decay(w, t, w->a + t * n);
    }
}

/* Keys, and ``queries``, as the state before the chunk meets them. */
INLINE void decay_in(struct walk *w, const int queries)
{
    const int64_t n = w->deep;
    for (int64_t i = 0; i < w->K; i += LANES) {
        vector before = {0};
        before += 1;
        for (int64_t t = 0; t < TOKENS; t++) {
            const int64_t place = t * n + i;
            before *= *(vector *)(w->a + place);
            if (queries)
                *(vector *)(w->in + place) = before * *(vector *)(w->q + place);
            *(vector *)(w->in + TOKENS * n + place) = -before * *(vector *)(w->k + place);
        }
    }
}

/* Keys as they are left in the state behind it. */
static void decay_out(struct walk *w)
{
    const int64_t n = w->deep;
    for (int64_t i = 0; i < w->K; i += LANES) {
        vector after = {0};
        after += 1;
        for (int64_t t = TOKENS - 1; t >= 0; t--) {
            const int64_t place = t * n + i;
            *(vector *)(w->out + place) = after * *(vector *)(w->k + place);
            after *= *(vector *)(w->a + place);
        }
        *(vector *)(w->total + i) = after;
    }
}

static void load_values(const struct walk *w, const struct operand *x, real factor, real *to)
{
    for (int64_t t = 0; t < TOKENS; t++)
        if (x->data && t < w->count)
            read_row(at(x, w->batch, w->first + t, w->head) + w->column, factor, w->columns, to + t * w->wide, w->V,
                     w->ahead * x->token);
        else
            fill(to + t * w->wide, 0, w->V);
}

/* P and L of a chunk. */
static void score(const struct walk *w)
{
    real *key = w->products; /* k_j, decayed to i */
    for (int64_t j = 0; j < TOKENS; j++) {
        scale(key, 1, w->k + j * w->deep, w->K);
        for (int64_t i = 0; i < TOKENS; i++) {
            vector P = {0}, L = {0};
            for (int64_t d = 0; i >= j && d < w->K; d += LANES) {
                const int64_t place = i * w->deep + d;
                vector x = *(vector *)(key + d);
                if (i > j)
                    x *= *(vector *)(w->a + place);
                *(vector *)(key + d) = x;
                P += *(vector *)(w->q + place) * x;
                L += *(vector *)(w->k + place) * x;
            }
            w->P[i * TOKENS + j] = sum(P);
            w->L[i * TOKENS + j] = i > j ? sum(L) : 0;
        }
    }
}

/* The state behind the chunk from that before it. */
static void advance(const struct walk *w, const real *state, real *next)
{
    product(w->K, w->V, TOKENS, (struct matrix){w->out, 1, w->deep}, w->values, w->wide, w->total, state, next, w->wide);
}

/* The same, and what is kept of the chunk. */
static void forward(struct walk *w, const real *state, real *next)
{
    real one[TOKENS] __attribute__((aligned(VECTOR_BYTES)));
    w->ahead = TOKENS;
    load_keys(w);
    decay_out(w);
    load_values(w, &w->p->v, 1, w->W);
    score(w);
    fill(one, 1, TOKENS);
    if (w->p->delta) {
        decay_in(w, 0);
        product(TOKENS, w->V, w->K, (struct matrix){w->in + TOKENS * w->deep, w->deep, 1}, state, w->wide, one, w->W, w->W,
                w->wide);
    }
    for (int64_t j = 0; j < TOKENS; j++) {
        scale(w->values + j * w->wide, w->beta[j], w->W + j * w->wide, w->V);
        for (int64_t i = j + 1; w->p->delta && i < TOKENS; i++)
            add(w->W + i * w->wide, -w->L[i * TOKENS + j], w->values + j * w->wide, w->V);
    }
    advance(w, state, next);
}

/* K_d and V' of a chunk of which the rest is kept. */
static void recall(struct walk *w)
{
    decay_out(w);
    for (int64_t t = 0; t < TOKENS; t++)
        scale(w->values + t * w->wide, w->beta[t], w->W + t * w->wide, w->V);
}

/* The gradient of V', and from it b Z (``grads``), dbeta and dv. */
static void backward_values(struct walk *w)
{
    const struct problem *p = w->p;
    real one[TOKENS] __attribute__((aligned(VECTOR_BYTES))), *z = w->grads + TOKENS * w->wide;
    fill(one, 1, TOKENS);
    product(TOKENS, w->V, TOKENS, (struct matrix){w->P, 1, TOKENS}, w->grads, w->wide, 0, z, z, w->wide);
    product(TOKENS, w->V, w->K, (struct matrix){w->out, w->deep, 1}, w->dS, w->wide, one, z, z, w->wide);
    for (int64_t j = TOKENS - 1; j >= 0; j--) {
        real *row = z + j * w->wide;
        w->dbeta[j] = dot(row, w->W + j * w->wide, w->V);
        scale(row, w->beta[j], row, w->V);
        for (int64_t i = 0; p->delta && i < j; i++)
            add(z + i * w->wide, -w->L[j * TOKENS + i], row, w->V);
    }
    for (int64_t t = 0; t < w->count; t++)
        write_row(z + t * w->wide, 1, w->columns,
                  p->dv + ((w->batch * p->length + w->first + t) * p->heads + w->head) * p->V + w->column, &w->seen);
}

/* LANES channels of the chunk: rows of vectors, ``row`` apart. */
struct strip {
    int64_t row;
    const vector *q, *k, *a;
    vector *dq, *dk, *da;
};

/* Through the states: dq, dk and da are set. */
INLINE void through_states(const struct walk *w, struct strip s, int64_t d, const int delta)
{
    const int64_t row = s.row;
    const vector *dQ = (vector *)(w->products_t + d), *dM = dQ + TOKENS * row, *dD = dM + TOKENS * row;
    vector before[TOKENS + 1], after[TOKENS], x = {0}, y = *(vector *)(w->overlap + d);
    before[0] = after[TOKENS - 1] = (vector){0} + 1; /* of token t at t + 1, and at t */
    for (int64_t t = 0; t < TOKENS; t++)
        before[t + 1] = before[t] * s.a[t * row];
    for (int64_t t = TOKENS - 1; t >= 0; t--) {
        x += s.q[t * row] * dQ[t * row];
        s.dq[t * row] = before[t + 1] * dQ[t * row];
        s.dk[t * row] = after[t] * dD[t * row];
        if (delta) {
            x -= s.k[t * row] * dM[t * row];
            s.dk[t * row] -= before[t + 1] * dM[t * row];
        }
        s.da[t * row] = x * before[t];
        x *= s.a[t * row];
        if (t)
            after[t - 1] = after[t] * s.a[t * row];
    }
    for (int64_t t = 0; t < TOKENS; t++) {
        s.da[t * row] += after[t] * y;
        y = s.a[t * row] * y + s.k[t * row] * dD[t * row];
    }
}

/* Token i of the walk from KEYS tokens j to the end, the first ``count`` of them being earlier than i. */
INLINE void step(
    struct strip s, const real *dP, const real *dL, int64_t i, vector key[KEYS], vector walked[KEYS][TOKENS],
    const int count, const int delta)
{
    const int64_t place = i * s.row;
    vector dq = s.dq[place], dk = s.dk[place];
    for (int r = 0; r < count; r++) {
        walked[r][i] = key[r];
        key[r] *= s.a[place];
    }
    for (int r = 0; r < KEYS && r <= count; r++) {
        dq += dP[i * TOKENS + r] * key[r];
        if (delta && r < count)
            dk -= dL[i * TOKENS + r] * key[r];
    }
    s.dq[place] = dq, s.dk[place] = dk;
}

/* The same token on the way back; ``sums`` are gradients of the keys as token i decayed them. */
INLINE void step_back(
    struct strip s, const real *dP, const real *dL, int64_t i, vector sums[KEYS], vector walked[KEYS][TOKENS],
    const int count, const int delta)
{
    const int64_t place = i * s.row;
    vector da = s.da[place];
    for (int r = 0; r < KEYS && r <= count; r++) {
        sums[r] += dP[i * TOKENS + r] * s.q[place];
        if (r == count) {
            s.dk[place] += sums[r];
            break;
        }
        if (delta)
            sums[r] -= dL[i * TOKENS + r] * s.k[place];
        da += sums[r] * walked[r][i];
        sums[r] *= s.a[place];
    }
    s.da[place] = da;
}

/* Through the pairs of the chunk: added to dq, dk and da. */
INLINE void through_pairs(const struct walk *w, struct strip s, const int delta)
{
    for (int64_t j = 0; j < TOKENS; j += KEYS) {
        const real *dP = w->pairs + j, *dL = dP + TOKENS * TOKENS;
        vector key[KEYS], sums[KEYS], walked[KEYS][TOKENS];
        for (int r = 0; r < KEYS; r++)
            key[r] = s.k[(j + r) * s.row], sums[r] = (vector){0};
#pragma GCC unroll 4
        for (int r = 0; r < KEYS; r++)
            step(s, dP, dL, j + r, key, walked, r, delta);
        for (int64_t i = j + KEYS; i < TOKENS; i++)
            step(s, dP, dL, i, key, walked, KEYS, delta);
        for (int64_t i = TOKENS - 1; i >= j + KEYS; i--)
            step_back(s, dP, dL, i, sums, walked, KEYS, delta);
#pragma GCC unroll 4
        for (int r = KEYS - 1; r >= 0; r--)
            step_back(s, dP, dL, j + r, sums, walked, r, delta);
    }
}

INLINE void backward_keys(const struct walk *w, const int delta)
{
    for (int64_t d = 0; d < w->K; d += LANES) {
        const struct strip s = {
            w->deep / LANES, (vector *)(w->q + d), (vector *)(w->k + d), (vector *)(w->a + d),
            (vector *)(w->dq + d), (vector *)(w->dk + d), (vector *)(w->da + d)};
        through_states(w, s, d, delta);
        through_pairs(w, s, delta);
        for (int64_t t = 0; w->p->log_decay && t < TOKENS; t++)
            s.da[t * s.row] *= s.a[t * s.row];
    }
}

/* The gradient of x from that of y = r x, r = 1 / sqrt(sum(x * x) + eps): r (dy - y (y . dy)) */
static void store_key(struct walk *w, const real *y, real *dy, real r, real *to)
{
    if (w->p->norm_eps != 0)
        add(dy, -dot(y, dy, w->K), y, w->K);
    write_row(dy, r, w->p->K, to, &w->seen);
}

static void store(struct walk *w)
{
    const struct problem *p = w->p;
    for (int64_t t = 0; t < w->count; t++) {
        const int64_t lane = ((w->part * p->batch + w->batch) * p->length + w->first + t) * p->heads + w->head;
        const int64_t row = t * w->deep;
        store_key(w, w->q + row, w->dq + row, w->q_factor[t], p->dq + lane * p->K);
        store_key(w, w->k + row, w->dk + row, w->k_factor[t], p->dk + lane * p->K);
        p->dbeta[lane] = w->dbeta[t];
        w->seen += 0 * p->dbeta[lane];
        if (!p->decay.data)
            continue;
        if (p->decay_per_channel)
            write_row(w->da + row, 1, p->K, p->ddecay + lane * p->K, &w->seen);
        else
            p->ddecay[lane] = total(w->da + row, w->K), w->seen += 0 * p->ddecay[lane];
    }
}

/* dQ, dM, dD and rowsum(S * dS') of ROWS channels, from ``i`` on, and dS before the chunk from dS behind it. All that is
 * read of both states is read here, while it is in the cache. */
static void backward_states(struct walk *w, const real *state, real *dS, int64_t i, int64_t rows)
{
    real *products = w->products + i * 3 * TOKENS;
    product(ROWS, rows, w->V, (struct matrix){state, w->wide, 1}, w->grads_t, 2 * TOKENS, 0, products, products,
            3 * TOKENS);
    product(ROWS, TOKENS, w->V, (struct matrix){dS, w->wide, 1}, w->values_t, TOKENS, 0, products, products + 2 * TOKENS,
            3 * TOKENS);
    for (int64_t r = 0; r < ROWS; r++)
        w->overlap[i + r] = w->p->decay.data ? dot(state + r * w->wide, dS + r * w->wide, w->V) : 0;
    product(ROWS, w->V, rows, (struct matrix){w->in + i, 1, w->deep}, w->grads, w->wide, w->total + i, dS, dS, w->wide);
}

/* The gradients of the chunk, and dS before it from dS behind it. */
static void backward(struct walk *w, const real *state)
{
    const struct problem *p = w->p;
    const int64_t rows = p->delta ? 2 * TOKENS : TOKENS;
    w->ahead = -TOKENS;
    decay_in(w, 1);
    recall(w);
    load_values(w, &p->grad_out, (real)p->scale, w->grads);
    backward_values(w);
    transpose(w->grads, w->wide, rows, w->V, w->grads_t, 2 * TOKENS);
    transpose(w->values, w->wide, TOKENS, w->V, w->values_t, TOKENS);
    product(rows, TOKENS, w->V, (struct matrix){w->grads, w->wide, 1}, w->values_t, TOKENS, 0, w->pairs, w->pairs, TOKENS);
    for (int64_t i = 0; i < w->K; i += ROWS)
        backward_states(w, state + i * w->wide, w->dS + i * w->wide, i, rows);
    transpose(w->products, 3 * TOKENS, w->K, 3 * TOKENS, w->products_t, w->deep);
    if (p->delta)
        backward_keys(w, 1);
    else
        backward_keys(w, 0);
    store(w);
}
