#include "pipeline/planner.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/matrix.h"

_Static_assert((int)PLANNER_KV_BLOCK_POSITIONS == (int)KV_BLOCK_POSITIONS,
               "plans and caches count the same blocks");

/* Sums over the layers before each one, so that a range's bytes are one subtraction. */
struct totals {
    uint64_t embed;
    uint64_t head;                           /* with its matrix, tied or not */
    uint64_t layers[FL_LAYER_COUNT_MAX + 1]; /* packed bytes of layers 0 .. i - 1 */
    uint64_t kv[FL_LAYER_COUNT_MAX + 1];     /* bytes of one KV block of layers 0 .. i - 1 */
    uint64_t activations;                    /* buffers of a stage */
    uint64_t logits;                         /* of the last stage, beside */
    uint32_t kv_blocks_min;
};

/* What a way to cut the first layers costs: least skipped nodes first, then `cost`. */
struct score {
    uint32_t skipped;
    double cost;
};

enum aim { AIM_FULLEST, AIM_EVEN };

struct search {
    const struct planner_request *request;
    const struct totals *totals;
    enum aim aim;
    double fullest_max; /* AIM_EVEN: no node may be fuller */
    /* [node_count + 1][layer_count + 1]: nodes and layers placed so far */
    struct score *best;
    uint16_t *taken; /* layers of the last of these nodes */
};

/* ---- bytes ---- */

static uint64_t packed_size(const struct fl_piece *piece)
{
    uint64_t size = 0;
    for (uint32_t i = 0; i < piece->tensor_count; i++) {
        const struct fl_tensor_ref *tensor = &piece->tensors[i];
        size += tensor->rows == 1
                    ? tensor->size
                    : matrix_packed_size(tensor->dtype, tensor->rows, tensor->columns);
    }
    return size;
}

/* Runs under way, the residual stream, q, k, v, gate and up, and their 8-bit copies. */
static uint64_t activation_size(const struct fl_model_shape *shape, uint32_t chunk_rows)
{
    uint64_t row_max = 0;
    for (uint32_t layer = 0; layer < shape->layer_count; layer++) {
        const uint64_t heads =
            (uint64_t)(shape->head_count[layer] + 2 * shape->head_count_kv[layer]) *
            shape->head_size;
        const uint64_t row =
            8 * (uint64_t)shape->width + 2 * heads + 3 * (uint64_t)shape->ffn_width[layer];
        row_max = row > row_max ? row : row_max;
    }
    return row_max * sizeof(float) * chunk_rows;
}

static void sum_up(const struct planner_request *request, struct totals *out)
{
    const struct fl_manifest *manifest = request->manifest;
    const struct fl_model_shape *shape = &manifest->shape;
    *out = (struct totals){
        .activations = activation_size(shape, request->chunk_rows),
        .logits = (uint64_t)shape->vocabulary * sizeof(float),
        .kv_blocks_min = (request->context_min + KV_BLOCK_POSITIONS - 1) / KV_BLOCK_POSITIONS,
    };
    uint64_t sizes[FL_LAYER_COUNT_MAX] = {0};
    for (uint32_t i = 0; i < manifest->piece_count; i++) {
        const struct fl_piece *piece = &manifest->pieces[i];
        const uint64_t size = packed_size(piece);
        switch (piece->kind) {
        case FL_PIECE_EMBED: out->embed = size; break;
        case FL_PIECE_HEAD: out->head = size; break;
        case FL_PIECE_ATTENTION:
        case FL_PIECE_FFN: sizes[piece->layer] += size; break;
        }
    }
    for (uint32_t layer = 0; layer < shape->layer_count; layer++) {
        const uint64_t kv = 2 * (uint64_t)shape->head_count_kv[layer] * shape->head_size *
                            sizeof(float) * KV_BLOCK_POSITIONS;
        out->layers[layer + 1] = out->layers[layer] + sizes[layer];
        out->kv[layer + 1] = out->kv[layer] + kv;
    }
}

/* Bytes of the embedding's table that lie beside the rest: a tied head on the same node is it. */
static uint64_t table_size(const struct planner_stage *stage, const struct fl_model_shape *shape,
                           const struct totals *totals)
{
    return stage->has_embed && !(stage->has_head && shape->tied_head) ? totals->embed : 0;
}

static struct planner_stage stage_of(const struct planner_request *request,
                                     const struct totals *totals, uint32_t node, uint32_t first,
                                     uint32_t count)
{
    const struct fl_model_shape *shape = &request->manifest->shape;
    struct planner_stage stage = {
        .node = node,
        .layer_first = first,
        .layer_count = count,
        .has_embed = first == 0,
        .has_head = first + count == shape->layer_count,
        .shard_size = totals->layers[first + count] - totals->layers[first],
        .kv_size = (totals->kv[first + count] - totals->kv[first]) * totals->kv_blocks_min,
        .overhead_size = PLANNER_OVERHEAD_SIZE + totals->activations,
    };
    stage.shard_size += table_size(&stage, shape, totals);
    if (stage.has_head) {
        stage.shard_size += totals->head;
        stage.overhead_size += totals->logits;
    }
    return stage;
}

static uint64_t stage_need(const struct planner_stage *stage)
{
    return stage->shard_size + stage->kv_size + stage->overhead_size;
}

/* Bytes by which a stage is too large for its node. */
static uint64_t stage_missing(const struct planner_request *request,
                              const struct planner_stage *stage)
{
    const struct planner_node *node = &request->nodes[stage->node];
    const uint64_t need = stage_need(stage);
    const uint64_t memory = need > node->memory_size ? need - node->memory_size : 0;
    const uint64_t kv = node->kv_size_max != 0 && stage->kv_size > node->kv_size_max
                            ? stage->kv_size - node->kv_size_max
                            : 0;
    return memory > kv ? memory : kv;
}

/* ---- search ---- */

static bool score_less(const struct score *a, const struct score *b)
{
    return a->skipped != b->skipped ? a->skipped < b->skipped : a->cost < b->cost;
}

/* The score when `node` takes `count` layers from `first` on; false when they do not fit. */
static bool extend(const struct search *search, const struct score *before, uint32_t node,
                   uint32_t first, uint32_t count, struct score *out)
{
    const struct planner_stage stage =
        stage_of(search->request, search->totals, node, first, count);
    if (stage_missing(search->request, &stage) != 0) {
        return false;
    }
    /* The table is there in the end, but it is read last and keeps no token waiting. */
    const uint64_t table = table_size(&stage, &search->request->manifest->shape, search->totals);
    const uint64_t memory = search->request->nodes[node].memory_size;
    const double need = (double)(stage_need(&stage) - table);
    const double full = need / (double)(memory - table);
    if (search->aim == AIM_EVEN && full > search->fullest_max) {
        return false;
    }
    const double fullest = full > before->cost ? full : before->cost;
    const double share = need / (double)memory;
    *out = (struct score){
        .skipped = before->skipped,
        .cost = search->aim == AIM_FULLEST ? fullest : before->cost + share * share,
    };
    return true;
}

/* Fill the table, node by node.  The result is the last entry. */
static void search_run(struct search *search)
{
    const uint32_t nodes = search->request->node_count;
    const uint32_t layers = search->request->manifest->shape.layer_count;
    const struct score none = {.skipped = UINT32_MAX, .cost = 0};
    const size_t width = (size_t)layers + 1;
    for (size_t i = 0; i < (nodes + 1) * width; i++) {
        search->best[i] = none;
        search->taken[i] = 0;
    }
    search->best[0] = (struct score){0};
    for (uint32_t node = 0; node < nodes; node++) {
        const struct score *from = &search->best[node * width];
        struct score *to = &search->best[(node + 1) * width];
        uint16_t *taken = &search->taken[(node + 1) * width];
        for (uint32_t first = 0; first <= layers; first++) {
            if (from[first].skipped == UINT32_MAX) {
                continue;
            }
            struct score score = from[first];
            score.skipped++;
            if (score_less(&score, &to[first])) {
                to[first] = score;
                taken[first] = 0;
            }
            for (uint32_t count = 1; count <= layers - first; count++) {
                if (!extend(search, &from[first], node, first, count, &score)) {
                    break; /* nor do more */
                }
                if (score_less(&score, &to[first + count])) {
                    to[first + count] = score;
                    taken[first + count] = (uint16_t)count;
                }
            }
        }
    }
}

/* Layers of each node by the filled table. */
static void search_read(const struct search *search, uint32_t *counts)
{
    const size_t width = (size_t)search->request->manifest->shape.layer_count + 1;
    size_t placed = width - 1;
    for (uint32_t node = search->request->node_count; node-- > 0;) {
        counts[node] = search->taken[(node + 1) * width + placed];
        placed -= counts[node];
    }
    FL_ASSERT(placed == 0);
}

/* FL_END when nothing fits. */
static fl_status choose(const struct planner_request *request, const struct totals *totals,
                        uint32_t *counts)
{
    const size_t width = (size_t)request->manifest->shape.layer_count + 1;
    const size_t entries = (request->node_count + 1) * width;
    struct search search = {
        .request = request,
        .totals = totals,
        .best = calloc(entries, sizeof(*search.best)),
        .taken = calloc(entries, sizeof(*search.taken)),
    };
    fl_status status = FL_OK;
    if (search.best == NULL || search.taken == NULL) {
        status = FL_FAIL(FL_NO_MEMORY, "no memory to plan %zu cuts", entries);
        goto free_tables;
    }
    const struct score *found = &search.best[entries - 1];
    search_run(&search);
    if (found->skipped == UINT32_MAX) {
        status = FL_END;
        goto free_tables;
    }
    search.aim = AIM_EVEN;
    search.fullest_max = found->cost;
    search_run(&search);
    search_read(&search, counts);
free_tables:
    free(search.best);
    free(search.taken);
    return status;
}

/* ---- sentences ---- */

struct size_text {
    char text[24];
};

static struct size_text show_size(uint64_t size)
{
    struct size_text shown;
    const double mib = (double)size / (1 << 20);
    if (mib >= 1024) {
        snprintf(shown.text, sizeof(shown.text), "%.2f GiB", mib / 1024);
    } else {
        snprintf(shown.text, sizeof(shown.text), "%.1f MiB", mib);
    }
    return shown;
}

/* Most layers from `first` on that a node holds. */
static uint32_t layers_that_fit(const struct planner_request *request, const struct totals *totals,
                                uint32_t node, uint32_t first)
{
    const uint32_t left = request->manifest->shape.layer_count - first;
    uint32_t fit = 0;
    for (; fit < left; fit++) {
        const struct planner_stage stage = stage_of(request, totals, node, first, fit + 1);
        if (stage_missing(request, &stage) != 0) {
            break;
        }
    }
    return fit;
}

/* Fill the nodes up in order; say what each holds, and what the last one would need for the rest. */
static fl_status refuse(const struct planner_request *request, const struct totals *totals)
{
    const uint32_t layers = request->manifest->shape.layer_count;
    const uint32_t last = request->node_count - 1;
    char where[224] = "";
    size_t used = 0;
    uint32_t placed = 0;
    uint32_t first = 0; /* of the last node */
    for (uint32_t node = 0; node <= last; node++) {
        const uint32_t count = layers_that_fit(request, totals, node, placed);
        char takes[48] = "nothing";
        if (count != 0) {
            snprintf(takes, sizeof(takes), "layers %" PRIu32 " to %" PRIu32, placed,
                     placed + count - 1);
        }
        const int size = snprintf(where + used, sizeof(where) - used, "%s%s (%s) holds %s",
                                  used != 0 ? ", " : "", request->nodes[node].name,
                                  show_size(request->nodes[node].memory_size).text, takes);
        used += size > 0 ? (size_t)size : 0;
        used = used < sizeof(where) ? used : sizeof(where) - 1;
        first = placed;
        placed += count;
    }
    const struct planner_stage rest = stage_of(request, totals, last, first, layers - first);
    const bool fits_memory = stage_need(&rest) <= request->nodes[last].memory_size;
    return FL_FAIL(FL_NO_MEMORY,
                   "model %s does not fit with %" PRIu32
                   " positions of context: %s are missing on node %s for layers %" PRIu32
                   " to %" PRIu32 "%s; %s; %s, add a node or ask for less context",
                   request->manifest->name, request->context_min,
                   show_size(stage_missing(request, &rest)).text, request->nodes[last].name, first,
                   layers - 1, rest.has_embed ? ", embedding and head" : " and head", where,
                   fits_memory ? "raise --kv-budget" : "free memory");
}

/* ---- plan ---- */

static fl_status check_split(const struct planner_request *request, const struct totals *totals,
                             uint32_t *counts)
{
    const uint32_t layers = request->manifest->shape.layer_count;
    uint64_t sum = 0;
    for (uint32_t node = 0; node < request->node_count; node++) {
        counts[node] = request->split[node];
        sum += counts[node];
    }
    if (sum != layers) {
        return FL_FAIL(FL_INVALID, "the split has %" PRIu64 " layers; model %s has %" PRIu32, sum,
                       request->manifest->name, layers);
    }
    uint32_t placed = 0;
    for (uint32_t node = 0; node < request->node_count; node++) {
        if (counts[node] == 0) {
            continue;
        }
        const struct planner_stage stage = stage_of(request, totals, node, placed, counts[node]);
        const uint64_t missing = stage_missing(request, &stage);
        if (missing != 0) {
            return FL_FAIL(
                FL_NO_MEMORY,
                "the split does not fit: node %s needs %s for layers %" PRIu32 " to %" PRIu32
                " with %" PRIu32 " positions of context, and %s are missing",
                request->nodes[node].name, show_size(stage_need(&stage)).text, placed,
                placed + counts[node] - 1, request->context_min, show_size(missing).text);
        }
        placed += counts[node];
    }
    return FL_OK;
}

/* Bytes a node lacks for the smallest layer there is. */
static uint64_t missing_for_one(const struct planner_request *request, const struct totals *totals,
                                uint32_t node)
{
    const uint32_t layers = request->manifest->shape.layer_count;
    uint64_t least = UINT64_MAX;
    for (uint32_t layer = 0; layer < layers; layer++) {
        const struct planner_stage stage = stage_of(request, totals, node, layer, 1);
        const uint64_t missing = stage_missing(request, &stage);
        least = missing < least ? missing : least;
    }
    return least;
}

/* The blocks every stage has room for, within its KV budget and its memory. */
static uint32_t kv_blocks_of(const struct planner_request *request, const struct totals *totals,
                             const struct planner_plan *plan)
{
    uint64_t blocks = PLANNER_KV_BLOCK_COUNT_MAX;
    for (uint32_t i = 0; i < plan->stage_count; i++) {
        const struct planner_stage *stage = &plan->stages[i];
        const struct planner_node *node = &request->nodes[stage->node];
        const uint64_t block = stage->kv_size / totals->kv_blocks_min;
        const uint64_t memory = node->memory_size - stage->shard_size - stage->overhead_size;
        const uint64_t room = memory < node->kv_size_max ? memory : node->kv_size_max;
        blocks = room / block < blocks ? room / block : blocks;
    }
    return blocks > totals->kv_blocks_min ? (uint32_t)blocks : totals->kv_blocks_min;
}

static void build(const struct planner_request *request, const struct totals *totals,
                  const uint32_t *counts, struct planner_plan *out)
{
    *out = (struct planner_plan){0};
    uint32_t placed = 0;
    for (uint32_t node = 0; node < request->node_count; node++) {
        if (counts[node] == 0) {
            out->left_out[out->left_out_count++] = (struct planner_left_out){
                .node = node,
                .missing_size = request->split != NULL ? 0 : missing_for_one(request, totals, node),
            };
            continue;
        }
        out->stages[out->stage_count++] = stage_of(request, totals, node, placed, counts[node]);
        placed += counts[node];
    }
    out->kv_block_count = kv_blocks_of(request, totals, out);
    for (uint32_t i = 0; i < out->stage_count; i++) {
        struct planner_stage *stage = &out->stages[i];
        stage->kv_size = stage->kv_size / totals->kv_blocks_min * out->kv_block_count;
    }
}

static fl_status check_request(const struct planner_request *request)
{
    const struct fl_manifest *manifest = request->manifest;
    if (request->node_count == 0) {
        return FL_FAIL(FL_NOT_FOUND, "no node has joined; model %s needs at least one",
                       manifest->name);
    }
    if (request->node_count > FL_STAGE_COUNT_MAX) {
        return FL_FAIL(FL_TOO_LARGE, "%" PRIu32 " nodes are more than a plan can hold, %d",
                       request->node_count, FL_STAGE_COUNT_MAX);
    }
    if (request->context_min < 1 || request->context_min > manifest->shape.context) {
        return FL_FAIL(FL_TOO_LARGE,
                       "a context of %" PRIu32 " positions was asked for; model %s has 1 to "
                       "%" PRIu32,
                       request->context_min, manifest->name, manifest->shape.context);
    }
    FL_ASSERT(request->chunk_rows >= 1 && request->chunk_rows <= FL_CHUNK_MAX);
    FL_ASSERT(manifest->piece_count == 2 * manifest->shape.layer_count + 2);
    return FL_OK;
}

fl_status planner_plan(const struct planner_request *request, struct planner_plan *out)
{
    uint32_t counts[FL_STAGE_COUNT_MAX] = {0};
    struct totals totals;
    FL_TRY(check_request(request));
    sum_up(request, &totals);
    if (request->split != NULL) {
        FL_TRY(check_split(request, &totals, counts));
    } else {
        const fl_status status = choose(request, &totals, counts);
        if (status == FL_END) {
            return refuse(request, &totals);
        }
        FL_TRY(status);
    }
    build(request, &totals, counts, out);
    return FL_OK;
}
