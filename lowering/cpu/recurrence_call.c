/* A call of the recurrence: rows that do not lie as recurrence.c reads them are made first, then the strips run. */
enum {
    TASK = 1 << 16, /* state elements times tokens worth waking a thread for, some 10 us */
    ROWS_TASK = 1 << 13, /* elements of rows that are */
};

/* exp of the log decays of ``count`` gates, in whole vectors; ``rate_step`` 0: one rate for all of them. */
static void decays(const struct call *c, const real *bias, const real *rate, int rate_step, real *x, int64_t count)
{
    const vector gate_scale = (vector){0} + (real)c->p->gate_scale;
    for (int64_t i = 0; i < count; i += LANES) {
        vector g = *(const vector *)(x + i);
        if (bias)
            g += *(const vector *)(bias + i);
        const vector own_rate = rate_step ? *(const vector *)(rate + i) : (vector){0} + *rate;
        *(vector *)(x + i) = exponential(log_decay(c->p->function, g, own_rate, gate_scale));
    }
}

/* The decays of token ``t`` of all tokens; of the call, where gates are one to a head. */
static void make_decays(const struct call *c, int64_t b, int64_t t, int64_t row)
{
    const struct problem *p = c->p;
    const int64_t place = p->gate == PER_HEAD ? 0 : b * p->g.stride[0] + t * p->g.stride[1];
    if (p->gate != PER_CHANNEL) {
        real *to = c->own_decay + (p->gate == PER_HEAD ? 0 : row * c->gates);
        read(&p->g, place, p->g.stride[p->gate == PER_HEAD ? 0 : 2], p->heads, to, c->gates);
        if (p->function >= 0)
            decays(c, c->bias, c->rate, 1, to, c->gates);
        return;
    }
    for (int64_t h = 0; h < p->heads; h++) {
        real *to = c->own_decay + row * c->gates + h * c->deep;
        read(&p->g, place + h * p->g.stride[2], p->g.stride[3], p->K, to, c->deep);
        if (p->function >= 0)
            decays(c, c->bias ? c->bias + h * c->deep : 0, c->rate + h, 0, to, c->deep);
    }
}

static void make_rows(const struct operand *x, int64_t b, int64_t t, int64_t heads, int64_t columns, real *to, int64_t wide)
{
    for (int64_t h = 0; h < heads; h++)
        read(x, b * x->stride[0] + t * x->stride[1] + h * x->stride[2], x->stride[3], columns, to + h * wide, wide);
}

/* What is made of tokens ``begin`` to ``end`` of all batch entries. */
static void make_tokens(int64_t begin, int64_t end, void *context)
{
    const struct call *c = context;
    const struct problem *p = c->p;
    const int64_t heads = p->heads, key_heads = heads / p->heads_per_key;
    for (int64_t i = begin; i < end; i++) {
        const int64_t b = i / p->length, t = i % p->length;
        if (c->own_q)
            make_rows(&p->q, b, t, key_heads, p->K, c->own_q + i * key_heads * c->deep, c->deep);
        if (c->own_k)
            make_rows(&p->k, b, t, key_heads, p->K, c->own_k + i * key_heads * c->deep, c->deep);
        if (c->own_v)
            make_rows(&p->v, b, t, heads, p->V, c->own_v + i * heads * c->wide, c->wide);
        if (c->own_decay && p->gate != PER_HEAD)
            make_decays(c, b, t, i);
        if (c->own_beta) {
            real *to = c->own_beta + i * in_vectors(heads);
            read(&p->beta, b * p->beta.stride[0] + t * p->beta.stride[1], p->beta.stride[2], heads, to, in_vectors(heads));
            for (int64_t h = 0; p->sigmoid_beta && h < heads; h += LANES)
                *(vector *)(to + h) = sigmoid(*(const vector *)(to + h));
        }
    }
}

/* Where ``rows`` of ``heads`` of ``columns`` are made for every token, if they are; how they lie. */
static struct rows placed(real **memory, int made, const struct operand *x, int64_t length, int64_t tokens, int64_t row,
                          int64_t head, real **own)
{
    *own = made ? *memory : 0;
    if (!made)
        return (struct rows){x->data, x->stride[0], x->stride[1], x->stride[2]};
    *memory += tokens * row;
    return (struct rows){*own, length * row, row, head};
}

/* Where everything lies behind ``memory``, and how many elements that is. */
static int64_t places(struct call *c, real *memory)
{
    const struct problem *p = c->p;
    const int64_t tokens = p->batch * p->length, heads = p->heads, key_heads = heads / p->heads_per_key;
    const int64_t keys = key_heads * c->deep, values = heads * c->wide;
    const int channel = p->gate == PER_CHANNEL;
    real *here = memory;
    c->q = placed(&here, !lies_in_rows(&p->q), &p->q, p->length, tokens, keys, c->deep, &c->own_q);
    c->k = placed(&here, !lies_in_rows(&p->k), &p->k, p->length, tokens, keys, c->deep, &c->own_k);
    c->v = placed(&here, !lies_in_rows(&p->v), &p->v, p->length, tokens, values, c->wide, &c->own_v);
    c->beta = placed(
        &here, p->beta.data && (p->sigmoid_beta || p->beta.kind != OWN), &p->beta, p->length, tokens, in_vectors(heads), 1,
        &c->own_beta);
    const int ready = p->function < 0 && p->g.kind == OWN && (!channel || p->g.stride[3] == 1);
    c->decay = placed(
        &here, p->gate != NO_GATE && !ready, &p->g, p->length, p->gate == PER_HEAD ? 1 : tokens, c->gates,
        channel ? c->deep : 1, &c->own_decay);
    if (p->gate == PER_HEAD)
        c->decay = (struct rows){c->decay.data, 0, 0, c->own_decay ? 1 : p->g.stride[0]};
    c->rate = here, here += in_vectors(heads);
    c->bias = p->dt_bias.data ? here : 0, here += c->bias ? c->gates : 0;
    return here - memory;
}

/* The parameters of the gates, and the gates themselves where they are one to a head. */
static void make_parameters(const struct call *c)
{
    const struct problem *p = c->p;
    if (!c->own_decay)
        return;
    read(&p->A_log, 0, p->A_log.stride[0], p->A_log.data ? p->heads : 0, c->rate, in_vectors(p->heads));
    for (int64_t h = 0; h < p->heads; h += LANES) /* exp(0) = 1 where there is none */
        *(vector *)(c->rate + h) = exponential(*(const vector *)(c->rate + h));
    if (c->bias && p->gate != PER_CHANNEL)
        read(&p->dt_bias, 0, p->dt_bias.stride[0], p->heads, c->bias, c->gates);
    for (int64_t h = 0; c->bias && p->gate == PER_CHANNEL && h < p->heads; h++)
        read(&p->dt_bias, h * p->dt_bias.stride[0], p->dt_bias.stride[1], p->K, c->bias + h * c->deep, c->deep);
    if (p->gate == PER_HEAD)
        make_decays(c, 0, 0, 0);
}

/* ``addresses``: of the operands, of out and of the final state, of bounds and slots. Nothing is written if it fails. */
int64_t linear_attention(const struct problem *template, const int64_t *addresses)
{
    enum { NEAR = 4096 };
    struct problem problem = *template;
    struct operand *operands[] = {
        &problem.q, &problem.k, &problem.v, &problem.g, &problem.beta, &problem.initial, &problem.A_log, &problem.dt_bias,
        &problem.out, &problem.final};
    for (int i = 0; i < 10; i++)
        operands[i]->data = (const void *)addresses[i];
    problem.bounds = (const int64_t *)addresses[10], problem.slots = (const int64_t *)addresses[11];

    struct call c = {.p = &problem, .deep = in_vectors(problem.K), .wide = in_vectors(problem.V)};
    c.gates = problem.gate == PER_CHANNEL ? problem.heads * c.deep : in_vectors(problem.heads);
    vector near[NEAR / LANES];
    const int64_t elements = places(&c, 0);
    char *memory = 0;
    real *aligned = (real *)near;
    if (elements > NEAR) {
        memory = __builtin_malloc(elements * sizeof(real) + VECTOR_BYTES);
        if (!memory)
            return 1;
        aligned = (real *)(memory + VECTOR_BYTES - (uintptr_t)memory % VECTOR_BYTES);
    }
    places(&c, aligned);
    make_parameters(&c);
    int64_t failed = 0;
    const int64_t tokens = problem.batch * problem.length, lanes = problem.sequences * problem.heads;
    if (c.own_q || c.own_k || c.own_v || c.own_beta || (c.own_decay && problem.gate != PER_HEAD))
        failed = shared_out(problem.divide, tokens, ROWS_TASK / (problem.heads * (c.deep + c.wide)), make_tokens, &c);
    const int64_t strips = (problem.V + WIDTH - 1) / WIDTH;
    const int64_t each = tokens / (problem.sequences ? problem.sequences : 1) * problem.K * WIDTH;
    if (!failed)
        failed = shared_out(problem.divide, lanes * strips, TASK / (each ? each : 1), run_strips, &c);
    __builtin_free(memory);
    return failed;
}
