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
 * Compiled with -DREAL=float or double, -DVECTOR_BYTES (a register) and -DVECTORS (registers to a strip's row, as many as
 * leave room for the sums). Only stdint.h is included, so compiling takes well under a second.
 */
#include <stdint.h>

typedef REAL real;

enum {
    AHEAD = 4,   /* tokens */
    ROWS = 4,    /* of the state at a time, K is a multiple: enough sums to hide the latency of adding */
    WIDTH = VECTORS * VECTOR_BYTES / sizeof(real),
};

typedef real vector __attribute__((vector_size(VECTOR_BYTES)));
typedef real loose __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias)); /* at any address */

/* A tensor [B, T, H, columns]: strides in elements, the last dimension contiguous. */
struct operand {
    const real *data;
    int64_t batch, token, head;
};

/* Packed by recurrence.py in this order. */
struct problem {
    struct operand q, k, v, decay, beta; /* decay and beta may be null */
    const real *initial;                 /* [sequences, heads, K, V], or null: zeros */
    real *out;                           /* [B, T, heads, V] */
    real *final;                         /* [sequences, heads, K, V] */
    const int64_t *bounds;               /* [sequences + 1] of packed sequences, or null: one to a batch entry */
    const int64_t *slots;                /* [sequences], where in initial and final its state is, or null: in order */
    int64_t length, heads, heads_per_key, K, V;
    int64_t decay_per_channel, delta;
    double scale, norm_eps;              /* norm_eps 0: q and k are taken as they are */
};

static const real *at(const struct operand *x, int64_t batch, int64_t token, int64_t head)
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
    vector sums[ROWS][VECTORS] = {{{0}}};
    for (int64_t i = 0; i < K; i += ROWS)
        for (int r = 0; r < ROWS; r++)
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
    vector sums[ROWS][VECTORS] = {{{0}}};
    for (int64_t i = 0; i < K; i += ROWS)
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < VECTORS; j++) {
                const vector next = decay[i + r] * state[i + r][j] + key[i + r] * u[j];
                state[i + r][j] = next;
                sums[r][j] += query[i + r] * next;
            }
    for (int j = 0; j < VECTORS; j++)
        out[j] = (sums[0][j] + sums[1][j]) + (sums[2][j] + sums[3][j]);
}

/* A row of a strip from and to memory, where only the first ``columns`` may exist. */
static void read_row(const real *from, vector to[VECTORS], int64_t columns)
{
    if (columns == WIDTH) {
        for (int j = 0; j < VECTORS; j++)
            to[j] = ((const loose *)from)[j];
    } else {
        for (int64_t i = 0; i < WIDTH; i++)
            ((real *)to)[i] = i < columns ? from[i] : (real)0;
    }
}

static void write_row(const vector from[VECTORS], real *to, int64_t columns)
{
    if (columns == WIDTH) {
        for (int j = 0; j < VECTORS; j++)
            ((loose *)to)[j] = from[j];
    } else {
        for (int64_t i = 0; i < columns; i++)
            to[i] = ((const real *)from)[i];
    }
}

/* One strip of one head of one sequence, from its initial to its final state. */
static void run_strip(const struct problem *p, int64_t sequence, int64_t head, int64_t column)
{
    const int64_t columns = p->V - column < WIDTH ? p->V - column : WIDTH;
    const int64_t slot = p->slots ? p->slots[sequence] : sequence;
    const int64_t tile = (slot * p->heads + head) * p->K * p->V + column;
    const int64_t batch = p->bounds ? 0 : sequence;
    const int64_t start = p->bounds ? p->bounds[sequence] : 0;
    const int64_t end = p->bounds ? p->bounds[sequence + 1] : p->length;
    vector state[p->K][VECTORS];
    real same_decay[p->K], key_decayed[p->K];

    if (slot < 0) { /* a request that is skipped */
        for (int64_t t = start; t < end; t++)
            for (int64_t i = 0; i < columns; i++)
                p->out[((batch * p->length + t) * p->heads + head) * p->V + column + i] = 0;
        return;
    }
    for (int64_t i = 0; i < p->K; i++) {
        for (int j = 0; j < VECTORS; j++)
            state[i][j] = (vector){0};
        if (p->initial)
            read_row(p->initial + tile + i * p->V, state[i], columns);
        same_decay[i] = 1;
    }
    for (int64_t t = start; t < end; t++) {
        const real *query = at(&p->q, batch, t, head / p->heads_per_key);
        const real *key = at(&p->k, batch, t, head / p->heads_per_key);
        const real *decay = p->decay.data ? at(&p->decay, batch, t, head) : same_decay;
        const real beta = p->beta.data ? *at(&p->beta, batch, t, head) : (real)1;
        const real query_factor = (real)p->scale * inverse_norm(query, p->K, p->norm_eps);
        const real key_factor = inverse_norm(key, p->K, p->norm_eps);
        vector u[VECTORS], out[VECTORS];

        if (t + AHEAD < end) {
            prefetch(query + AHEAD * p->q.token, p->K);
            prefetch(key + AHEAD * p->k.token, p->K);
            if (p->decay.data && p->decay_per_channel)
                prefetch(decay + AHEAD * p->decay.token, p->K);
            prefetch(at(&p->v, batch, t + AHEAD, head) + column, columns);
        }
        if (p->decay.data && !p->decay_per_channel) {
            for (int64_t i = 0; i < p->K; i++)
                same_decay[i] = *decay;
            decay = same_decay;
        }
        read_row(at(&p->v, batch, t, head) + column, u, columns);
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
        for (int j = 0; j < VECTORS; j++)
            out[j] *= query_factor;
        write_row(out, p->out + ((batch * p->length + t) * p->heads + head) * p->V + column, columns);
    }
    for (int64_t i = 0; i < p->K; i++)
        write_row(state[i], p->final + tile + i * p->V, columns);
}

/* Values in a strip, for whoever counts the tasks. */
int64_t strip_width(void)
{
    return WIDTH;
}

/* Tasks ``begin`` to ``end``, a task being a (sequence, head, strip); torch_parallel_for calls this on its threads. */
void linear_attention(int64_t begin, int64_t end, void *context)
{
    const struct problem *p = context;
    const int64_t strips = (p->V + WIDTH - 1) / WIDTH;
    for (int64_t i = begin; i < end; i++) {
        const int64_t lane = i / strips;
        run_strip(p, lane / p->heads, lane % p->heads, i % strips * WIDTH);
    }
}
