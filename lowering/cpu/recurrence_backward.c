/* Gradients of the recurrence: the walks over the chunks of a sequence; vectors.c and backward_chunk.c come before it. */
enum { GROUP = 8 }; /* chunks, of whose states one is kept */

/* A state [K, V] of memory, or zeros, and back. */
static void read_state(const struct walk *w, const real *from, real *to)
{
    for (int64_t i = 0; i < w->K; i++)
        if (from && i < w->p->K)
            read_row(from + i * w->p->V, 1, w->columns, to + i * w->wide, w->V, 0);
        else
            fill(to + i * w->wide, 0, w->V);
}

/* How memory is cut: chunks and states kept at a time, and elements of the whole. */
struct room {
    int64_t kept, states, state, chunk, elements;
};

static struct room room_for(const struct walk *w, int64_t chunks)
{
    const int64_t state = w->K * w->wide, chunk = TOKENS * (2 * TOKENS + w->wide + 3 * w->deep + 3);
    int64_t kept = w->p->history / (state / GROUP + chunk) + 1;
    while (kept * kept < chunks) /* so that checkpoints do not become more than what is kept */
        kept++;
    kept = kept < chunks ? kept : chunks ? chunks : 1;
    const int64_t states = (kept < GROUP ? kept : GROUP - 1) + kept / GROUP;
    const int64_t fixed = TOKENS * (9 * w->deep + 3 * w->wide + 3 * w->V + 3 * w->K + 2 * TOKENS) + 2 * w->deep + state;
    return (struct room){
        kept, states, state, chunk, fixed + (chunks / kept + 1) * state + kept * chunk + states * state};
}

static real *taken(real **memory, int64_t count)
{
    real *here = *memory;
    *memory += count;
    return here;
}

/* The chunk at ``first``, of which ``kept`` holds what is kept. */
static void turn_to(struct walk *w, int64_t first, real *kept)
{
    const int64_t keys = TOKENS * w->deep, pairs = TOKENS * TOKENS;
    w->first = first, w->count = w->end - first < TOKENS ? w->end - first : TOKENS;
    w->q = taken(&kept, keys), w->k = taken(&kept, keys), w->a = taken(&kept, keys);
    w->P = taken(&kept, pairs), w->L = taken(&kept, pairs), w->W = taken(&kept, TOKENS * w->wide);
    w->beta = taken(&kept, TOKENS), w->q_factor = taken(&kept, TOKENS), w->k_factor = taken(&kept, TOKENS);
}

/* Where the state before chunk ``i`` of a span is. */
static real *before(real *checkpoint, real *states, struct room room, int64_t i)
{
    if (i == 0)
        return checkpoint;
    return states + (i % GROUP ? i % GROUP - 1 : GROUP - 2 + i / GROUP) * room.state;
}

/* Over ``count`` chunks and back, from the state at ``checkpoint``. Of every GROUP states one is kept on the way; the
 * others are made again, which takes less than to fetch them from memory. */
static void run_span(
    struct walk *w, int64_t first, int64_t count, struct room room, real *checkpoint, real *states, real *kept)
{
    for (int64_t i = 0; i < count; i++) {
        turn_to(w, first + i * TOKENS, kept + i * room.chunk);
        forward(w, before(checkpoint, states, room, i), before(checkpoint, states, room, i + 1));
    }
    for (int64_t end = count, begin; end > 0; end = begin) {
        begin = (end - 1) / GROUP * GROUP;
        for (int64_t i = begin; end < count && i < end - 1; i++) {
            turn_to(w, first + i * TOKENS, kept + i * room.chunk);
            recall(w);
            advance(w, before(checkpoint, states, room, i), before(checkpoint, states, room, i + 1));
        }
        for (int64_t i = end - 1; i >= begin; i--) {
            turn_to(w, first + i * TOKENS, kept + i * room.chunk);
            backward(w, before(checkpoint, states, room, i));
        }
    }
}

/* From the first chunk to the last, then back, ``kept`` at a time. */
static void run_walk(struct walk *w, int64_t chunks, struct room room, real *memory)
{
    const struct problem *p = w->p;
    const int64_t n = TOKENS * w->deep, v = TOKENS * w->wide, tile = (w->sequence * p->heads + w->head) * p->K * p->V;
    real **keys[] = {&w->out, &w->dq, &w->dk, &w->da};
    for (int i = 0; i < 4; i++)
        *keys[i] = taken(&memory, n);
    w->in = taken(&memory, 2 * n), w->products_t = taken(&memory, 3 * n);
    w->total = taken(&memory, w->deep), w->overlap = taken(&memory, w->deep);
    w->grads = taken(&memory, 2 * v), w->values = taken(&memory, v);
    w->grads_t = taken(&memory, 2 * TOKENS * w->V), w->values_t = taken(&memory, TOKENS * w->V);
    w->products = taken(&memory, 3 * TOKENS * w->K), w->pairs = taken(&memory, 2 * TOKENS * TOKENS);
    w->dS = taken(&memory, room.state);
    real *kept = taken(&memory, room.kept * room.chunk), *states = taken(&memory, room.states * room.state);
    real *checkpoints = memory; /* the state before every span */

    read_state(w, p->grad_final ? p->grad_final + tile + w->column : 0, w->dS);
    read_state(w, p->initial ? p->initial + tile + w->column : 0, checkpoints);
    const int64_t spans = (chunks + room.kept - 1) / room.kept;
    for (int64_t i = 0; i < (spans - 1) * room.kept; i++) {
        const int64_t span = i / room.kept, last = (i + 1) % room.kept == 0;
        turn_to(w, w->start + i * TOKENS, kept);
        forward(w, i % room.kept ? states : checkpoints + span * room.state,
                last ? checkpoints + (span + 1) * room.state : states);
    }
    for (int64_t span = spans - 1; span >= 0; span--) {
        const int64_t first = w->start + span * room.kept * TOKENS;
        const int64_t count = span < spans - 1 ? room.kept : chunks - span * room.kept;
        run_span(w, first, count, room, checkpoints + span * room.state, states, kept);
    }
    for (int64_t i = 0; i < p->K; i++)
        write_row(w->dS + i * w->wide, 1, w->columns, p->dinitial + tile + i * p->V + w->column, &w->seen);
}

#ifdef __linux__
extern int madvise(void *, unsigned long, int);
#endif

/* Large memory in pages of 2 MiB, where the system has any: a task that it gives 4 KiB one by one waits for a fifth of its
 * time. What it answers makes no difference. */
void linear_attention_pages(char *from, int64_t bytes)
{
#ifdef __linux__
    enum { PAGE = 4096, LARGE = 1 << 22, HUGE_PAGES = 14 };
    const uintptr_t begin = ((uintptr_t)from + PAGE - 1) / PAGE * PAGE, end = ((uintptr_t)from + bytes) / PAGE * PAGE;
    if (bytes >= LARGE)
        madvise((void *)begin, end - begin, HUGE_PAGES);
#endif
}

static int64_t padded(int64_t x)
{
    return (x + TOKENS - 1) / TOKENS * TOKENS;
}

/* Tasks ``begin`` to ``end``, a task being a (sequence, head, part); torch_parallel_for calls this on its threads. */
void linear_attention_backward(int64_t begin, int64_t end, void *context)
{
    struct problem *p = context;
    char *memory = 0;
    int64_t bytes = 0;
    for (int64_t i = begin; i < end; i++) {
        const int64_t lane = i / p->parts, part = i % p->parts;
        struct walk w = {.p = p, .sequence = lane / p->heads, .head = lane % p->heads, .part = part};
        w.batch = p->bounds ? 0 : w.sequence;
        w.start = p->bounds ? p->bounds[w.sequence] : 0;
        w.end = p->bounds ? p->bounds[w.sequence + 1] : p->length;
        const int64_t share = padded((p->V + p->parts - 1) / p->parts);
        w.column = part * share, w.columns = p->V - w.column < share ? p->V - w.column : share;
        w.K = padded(p->K), w.V = padded(w.columns), w.deep = w.K + TOKENS, w.wide = w.V + TOKENS;
        const int64_t chunks = (w.end - w.start + TOKENS - 1) / TOKENS;
        const struct room room = room_for(&w, chunks);
        const int64_t wanted = room.elements * sizeof(real) + VECTOR_BYTES;
        if (wanted > bytes) { /* the next tasks take the same */
            __builtin_free(memory);
            memory = __builtin_malloc(bytes = wanted);
            if (!memory) {
                p->failed = 1;
                return;
            }
            linear_attention_pages(memory, bytes);
        }
        real *aligned = (real *)(((uintptr_t)memory + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES);
        for (int64_t j = 0; p->poison && j < room.elements; j++)
            aligned[j] = (real)__builtin_nan("");
        run_walk(&w, chunks, room, aligned);
        if (sum(w.seen) != 0)
            p->strange = 1;
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* what went past the caches is seen before the tasks' end is */
    __builtin_free(memory);
}
