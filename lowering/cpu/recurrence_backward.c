/* Gradients of the token recurrence (recurrence.c) on a CPU.
 *
 * Per sequence and value head, with P_t = diag(a_t) S_{t-1}, w_t = v_t - P_t^T k_t (v_t without the delta term) and
 * u_t = beta_t w_t, so that S_t = P_t + k_t u_t^T and o_t = scale S_t^T q_t. Backwards in t, with D the gradient of S_t:
 *
 *     D += scale q_t do_t^T        dq_t = scale S_t do_t        du = D^T k_t
 *     dv_t = beta_t du             dbeta_t = du . w_t           dk_t = D u_t - P_t dv_t        (the last with delta)
 *     D -= k_t dv_t^T (with delta) da_t = rowsum(D * S_{t-1})   D = diag(a_t) D
 *
 * A value column never reads another here either: the state is stored transposed, a row to a value column, and a block of
 * rows is taken through the whole sequence at once. Sums over K end within a row; those over V (dq, dk, da) run along
 * whole rows. States are computed again from checkpoints, as many tokens at a time as fit in the second-level cache, so
 * memory is that of the checkpoints. No gate is ever divided by.
 *
 * Compiled like recurrence.c. Only stdint.h is included.
 */
#include <stdint.h>

typedef REAL real;

enum {
    LANES = VECTOR_BYTES / sizeof(real),
    ROWS = 4,    /* of the state at a time: what belongs to the token is read once for all of them */
    BLOCK = 32,  /* rows taken through the sequence together */
    NARROW = 16, /* bytes of the smallest register that every target has */
    HISTORY = 1 << 17, /* elements of the states that are kept between a forward and a backward walk */
};

typedef real vector __attribute__((vector_size(VECTOR_BYTES)));
typedef real narrow __attribute__((vector_size(NARROW)));

/* A tensor [B, T, H, columns]: strides in elements, the last dimension contiguous. */
struct operand {
    const real *data;
    int64_t batch, token, head;
};

/* Packed by backward.py in this order. */
struct problem {
    struct operand q, k, v, decay, beta, grad_out; /* decay, beta and grad_out may be null */
    const real *initial, *grad_final;              /* [sequences, heads, K, V], or null: zeros */
    real *dq, *dk, *dv, *ddecay, *dbeta;           /* [parts, B, T, heads, K | V | 1]; see ``sums`` */
    real *dinitial;                                /* [sequences, heads, K, V] */
    const int64_t *bounds;                         /* [sequences + 1] of packed sequences, or null */
    int64_t batch, length, heads, heads_per_key, K, V, parts, decay_per_channel, delta;
    double scale;
    int64_t failed;                                /* set where memory ran out */
};

static const real *at(const struct operand *x, int64_t batch, int64_t token, int64_t head)
{
    return x->data + batch * x->batch + token * x->token + head * x->head;
}

static real sum(vector x)
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

/* What a block of rows works on. Rows of K are padded with zeros to whole vectors. */
struct walk {
    const struct problem *p;
    int64_t sequence, head, batch, start, end, column, columns; /* of V: the first, and how many there are */
    int64_t vectors;                                            /* to a row */
    vector *q, *k, *a, *dq, *dk, *da;                           /* one row each: the token's, and its gradients */
    real v[BLOCK], grad_out[BLOCK], beta;                       /* the token's */
    vector *state, *grad;                                       /* [BLOCK, vectors] */
    vector *checkpoints, *history;                              /* [., BLOCK, vectors] */
    real *w;                                                    /* [tokens kept, BLOCK] */
};

static void read_row(const real *from, vector *to, int64_t count, real factor)
{
    for (int64_t i = 0; i < count; i++)
        ((real *)to)[i] = factor * from[i];
}

static void read_columns(const struct walk *s, const struct operand *x, int64_t t, real to[BLOCK])
{
    const real *from = at(x, s->batch, t, s->head) + s->column;
    for (int64_t row = 0; row < BLOCK; row++)
        to[row] = row < s->columns ? from[row] : (real)0;
}

/* What a walk knows of token t; the query is scaled. */
static void load(struct walk *s, int64_t t)
{
    const struct problem *p = s->p;
    const int64_t key_head = s->head / p->heads_per_key;
    read_row(at(&p->q, s->batch, t, key_head), s->q, p->K, (real)p->scale);
    read_row(at(&p->k, s->batch, t, key_head), s->k, p->K, 1);
    if (p->decay.data && p->decay_per_channel)
        read_row(at(&p->decay, s->batch, t, s->head), s->a, p->K, 1);
    else if (p->decay.data)
        for (int64_t i = 0; i < p->K; i++)
            ((real *)s->a)[i] = *at(&p->decay, s->batch, t, s->head);
    s->beta = p->beta.data ? *at(&p->beta, s->batch, t, s->head) : (real)1;
    read_columns(s, &p->v, t, s->v);
    if (p->grad_out.data)
        read_columns(s, &p->grad_out, t, s->grad_out);
}

/* S_t from S_{t-1}; the rows of w_t are returned in ``w``. */
static void forward(const struct walk *s, real w[BLOCK])
{
    const int64_t n = s->vectors;
    for (int64_t row = 0; row < BLOCK; row += ROWS) {
        vector *state = s->state + row * n, known[ROWS] = {{0}};
        for (int64_t i = 0; i < n; i++) {
            const vector k = s->k[i], a = s->a[i];
            for (int r = 0; r < ROWS; r++) {
                const vector decayed = a * state[r * n + i];
                known[r] += decayed * k;
                state[r * n + i] = decayed;
            }
        }
        real u[ROWS];
        for (int r = 0; r < ROWS; r++) {
            w[row + r] = s->v[row + r] - (s->p->delta ? sum(known[r]) : (real)0);
            u[r] = s->beta * w[row + r];
        }
        for (int64_t i = 0; i < n; i++) {
            const vector k = s->k[i];
            for (int r = 0; r < ROWS; r++)
                state[r * n + i] += u[r] * k;
        }
    }
}

/* From the gradient of S_t to that of S_{t-1}, for ``ROWS`` rows from ``row`` on; returns their part of dbeta_t. */
static real backward_rows(const struct walk *s, int64_t t, int64_t row, const vector *before, const real *w)
{
    const int64_t n = s->vectors;
    vector *grad = s->grad + row * n, sums[ROWS] = {{0}};
    real go[ROWS], u[ROWS], dv[ROWS], recalled[ROWS], dbeta = 0;
    for (int r = 0; r < ROWS; r++) {
        go[r] = s->grad_out[row + r];
        u[r] = s->beta * w[row + r];
    }
    for (int64_t i = 0; i < n; i++) {
        const vector q = s->q[i], k = s->k[i], a = s->a[i];
        vector dq = s->dq[i];
        for (int r = 0; r < ROWS; r++) {
            const vector d = grad[r * n + i] + go[r] * q;
            dq += go[r] * (a * before[(row + r) * n + i] + k * u[r]);
            sums[r] += d * k;
            grad[r * n + i] = d;
        }
        s->dq[i] = dq;
    }
    for (int r = 0; r < ROWS; r++) {
        const real du = sum(sums[r]);
        dbeta += du * w[row + r];
        dv[r] = s->beta * du;
        recalled[r] = s->p->delta ? dv[r] : (real)0;
        if (row + r < s->columns)
            s->p->dv[((s->batch * s->p->length + t) * s->p->heads + s->head) * s->p->V + s->column + row + r] = dv[r];
    }
    for (int64_t i = 0; i < n; i++) {
        const vector k = s->k[i], a = s->a[i];
        vector dk = s->dk[i], da = s->da[i];
        for (int r = 0; r < ROWS; r++) {
            const vector state = before[(row + r) * n + i], d = grad[r * n + i], kept = d - k * recalled[r];
            dk += d * u[r] - a * state * recalled[r];
            da += kept * state;
            grad[r * n + i] = a * kept;
        }
        s->dk[i] = dk, s->da[i] = da;
    }
    return dbeta;
}

/* Add the token's rows to what other blocks of the same part have put there. */
static void store(const struct walk *s, int64_t t, int64_t part, real dbeta)
{
    const struct problem *p = s->p;
    const int64_t lane = ((part * p->batch + s->batch) * p->length + t) * p->heads + s->head;
    const real *dq = (real *)s->dq, *dk = (real *)s->dk, *da = (real *)s->da;
    real total = 0;
    for (int64_t i = 0; i < p->K; i++) {
        p->dq[lane * p->K + i] += (real)p->scale * dq[i];
        p->dk[lane * p->K + i] += dk[i];
    }
    p->dbeta[lane] += dbeta;
    if (p->decay.data && p->decay_per_channel)
        for (int64_t i = 0; i < p->K; i++)
            p->ddecay[lane * p->K + i] += da[i];
    else if (p->decay.data) {
        for (int64_t i = 0; i < p->K; i++)
            total += da[i];
        p->ddecay[lane] += total;
    }
}

static void backward(const struct walk *s, int64_t t, int64_t part, const vector *before, const real *w)
{
    real dbeta = 0;
    for (int64_t i = 0; i < s->vectors; i++)
        s->dq[i] = s->dk[i] = s->da[i] = (vector){0};
    for (int64_t row = 0; row < BLOCK; row += ROWS)
        dbeta += backward_rows(s, t, row, before, w);
    store(s, t, part, dbeta);
}

static void copy(vector *to, const vector *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = from[i];
}

/* Rows of a state [K, V] into the walk's [BLOCK, K] and back. */
static void read_state(const struct walk *s, const real *from, vector *to)
{
    for (int64_t i = 0; i < BLOCK * s->vectors; i++)
        to[i] = (vector){0};
    for (int64_t i = 0; from && i < s->p->K; i++)
        for (int64_t row = 0; row < s->columns; row++)
            ((real *)(to + row * s->vectors))[i] = from[i * s->p->V + s->column + row];
}

static void write_state(const struct walk *s, const vector *from, real *to)
{
    for (int64_t i = 0; i < s->p->K; i++)
        for (int64_t row = 0; row < s->columns; row++)
            to[i * s->p->V + s->column + row] = ((const real *)(from + row * s->vectors))[i];
}

/* One block of rows through a sequence: forward once for the checkpoints, then backward, ``kept`` tokens at a time. */
static void run_block(struct walk *s, int64_t part, int64_t kept)
{
    const struct problem *p = s->p;
    const int64_t tile = (s->sequence * p->heads + s->head) * p->K * p->V, size = BLOCK * s->vectors;
    const int64_t pieces = (s->end - s->start + kept - 1) / kept;
    real unused[BLOCK];
    read_state(s, p->initial ? p->initial + tile : 0, s->state);
    read_state(s, p->grad_final ? p->grad_final + tile : 0, s->grad);
    for (int64_t t = s->start; t < s->start + (pieces - 1) * kept; t++) {
        if ((t - s->start) % kept == 0)
            copy(s->checkpoints + (t - s->start) / kept * size, s->state, size);
        load(s, t);
        forward(s, unused);
    }
    for (int64_t piece = pieces - 1; piece >= 0; piece--) {
        const int64_t first = s->start + piece * kept, last = first + kept < s->end ? first + kept : s->end;
        if (piece < pieces - 1)
            copy(s->state, s->checkpoints + piece * size, size);
        for (int64_t t = first; t < last; t++) {
            copy(s->history + (t - first) * size, s->state, size);
            load(s, t);
            forward(s, s->w + (t - first) * BLOCK);
        }
        for (int64_t t = last - 1; t >= first; t--) {
            load(s, t);
            backward(s, t, part, s->history + (t - first) * size, s->w + (t - first) * BLOCK);
        }
    }
    write_state(s, s->grad, p->dinitial + tile);
}

/* Every ``parts``-th block of rows of one head of one sequence. */
static void run_lane(struct problem *p, int64_t sequence, int64_t head, int64_t part)
{
    struct walk s = {.p = p, .sequence = sequence, .head = head, .batch = p->bounds ? 0 : sequence};
    s.start = p->bounds ? p->bounds[sequence] : 0;
    s.end = p->bounds ? p->bounds[sequence + 1] : p->length;
    s.vectors = (p->K + LANES - 1) / LANES;
    const int64_t size = BLOCK * s.vectors, fit = HISTORY / (size * LANES), kept = fit < BLOCK ? BLOCK : fit;
    const int64_t rows = 6 * s.vectors + 2 * size, pieces = (s.end - s.start + kept - 1) / kept;
    const int64_t held = (rows + (pieces + kept) * size) * sizeof(vector) + kept * BLOCK * sizeof(real);
    char *memory = __builtin_malloc(held + VECTOR_BYTES);
    if (!memory) {
        p->failed = 1;
        return;
    }
    vector *next = (vector *)(((uintptr_t)memory + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES);
    vector **places[] = {&s.q, &s.k, &s.a, &s.dq, &s.dk, &s.da};
    for (int i = 0; i < 6; i++) {
        *places[i] = next;
        for (int64_t j = 0; j < s.vectors; j++)
            *next++ = i == 2 ? (vector){0} + 1 : (vector){0};
    }
    s.state = next, s.grad = s.state + size, s.checkpoints = s.grad + size;
    s.history = s.checkpoints + pieces * size, s.w = (real *)(s.history + kept * size);
    for (s.column = part * BLOCK; s.column < p->V; s.column += p->parts * BLOCK) {
        s.columns = p->V - s.column < BLOCK ? p->V - s.column : BLOCK;
        run_block(&s, part, kept);
    }
    __builtin_free(memory);
}

/* Rows of the state in a block, for whoever counts the parts. */
int64_t block_rows(void)
{
    return BLOCK;
}

/* Tasks ``begin`` to ``end``, a task being a (sequence, head, part); torch_parallel_for calls this on its threads. */
void linear_attention_backward(int64_t begin, int64_t end, void *context)
{
    struct problem *p = context;
    for (int64_t i = begin; i < end; i++) {
        const int64_t lane = i / p->parts;
        run_lane(p, lane / p->heads, lane % p->heads, i % p->parts);
    }
}
