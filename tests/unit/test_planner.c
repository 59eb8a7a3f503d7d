/* Planner: balance, order, nodes too small, tied heads, explicit splits, what refusals say. */
#include "pipeline/planner.h"

#include <stdlib.h>

#include "kernels/kernels.h"
#include "kernels/matrix.h"
#include "tests/harness.h"

enum { MIB = 1 << 20, LAYERS_MAX = 64 };

/* A model whose every layer has one matrix for each half: sizes are easy to know. */
struct fixture {
    struct fl_manifest manifest;
    struct fl_piece pieces[2 * LAYERS_MAX + 2];
    struct planner_node nodes[FL_STAGE_COUNT_MAX];
    uint32_t split[FL_STAGE_COUNT_MAX];
    struct planner_request request;
    struct planner_plan plan;
};

static void add_piece(struct fixture *f, enum fl_piece_kind kind, uint32_t layer,
                      enum fl_tensor_role role, uint32_t rows)
{
    f->pieces[f->manifest.piece_count++] = (struct fl_piece){
        .kind = kind,
        .layer = layer,
        .tensor_count = 1,
        .tensors[0] = {.role = role, .dtype = FL_DTYPE_F32, .rows = rows, .columns = 1024},
    };
}

/* Layers of 8 MiB (two matrices of 1024 x 1024 f32), embedding and head of `table_mib`. */
static void fixture_init(struct fixture *f, uint32_t layers, uint32_t table_mib, bool tied)
{
    *f = (struct fixture){0};
    f->manifest.pieces = f->pieces;
    snprintf(f->manifest.name, sizeof(f->manifest.name), "toy");
    struct fl_model_shape *shape = &f->manifest.shape;
    *shape = (struct fl_model_shape){
        .layer_count = layers,
        .width = 1024,
        .head_size = 64,
        .vocabulary = table_mib * 256,
        .context = 4096,
        .tied_head = tied,
    };
    add_piece(f, FL_PIECE_EMBED, 0, FL_ROLE_TOKEN_EMBD, table_mib * 256);
    for (uint32_t layer = 0; layer < layers; layer++) {
        shape->head_count[layer] = 16;
        shape->head_count_kv[layer] = 2; /* 2 x 2 x 64 x 4 = 1 KiB of KV a position */
        shape->ffn_width[layer] = 1024;
        add_piece(f, FL_PIECE_ATTENTION, layer, FL_ROLE_ATTN_Q, 1024);
        add_piece(f, FL_PIECE_FFN, layer, FL_ROLE_FFN_UP, 1024);
    }
    add_piece(f, FL_PIECE_HEAD, 0, FL_ROLE_OUTPUT, table_mib * 256);
    f->request = (struct planner_request){
        .manifest = &f->manifest,
        .nodes = f->nodes,
        .context_min = 1024,
        .chunk_rows = 32,
    };
}

static void add_node(struct fixture *f, const char *name, uint64_t memory_mib, uint64_t kv_mib)
{
    f->nodes[f->request.node_count++] = (struct planner_node){
        .name = name, .memory_size = memory_mib * MIB, .kv_size_max = kv_mib * MIB};
}

/* The stages cover all layers in order, each within its node's memory. */
static void check_sound(const struct fixture *f)
{
    const struct planner_plan *plan = &f->plan;
    const uint32_t layers = f->manifest.shape.layer_count;
    uint32_t placed = 0;
    CHECK_EQ(plan->stage_count + plan->left_out_count, f->request.node_count);
    for (uint32_t i = 0; i < plan->stage_count; i++) {
        const struct planner_stage *stage = &plan->stages[i];
        CHECK_EQ(stage->layer_first, placed);
        CHECK(stage->layer_count >= 1);
        placed += stage->layer_count;
        CHECK(i == 0 || stage->node > plan->stages[i - 1].node);
        CHECK_EQ(stage->has_embed, i == 0);
        CHECK_EQ(stage->has_head, i == plan->stage_count - 1);
        CHECK(stage->shard_size + stage->kv_size + stage->overhead_size <=
              f->nodes[stage->node].memory_size);
        CHECK(stage->kv_size ==
              (uint64_t)stage->layer_count * plan->kv_block_count * KV_BLOCK_POSITIONS * 1024);
        CHECK(f->nodes[stage->node].kv_size_max == 0 ||
              stage->kv_size <= f->nodes[stage->node].kv_size_max);
    }
    CHECK_EQ(placed, layers);
    CHECK(plan->kv_block_count >= f->request.context_min / KV_BLOCK_POSITIONS);
}

static void check_plans(struct fixture *f)
{
    CHECK_EQ(planner_plan(&f->request, &f->plan), FL_OK);
    check_sound(f);
}

static void check_refused(struct fixture *f, fl_status want, const char *phrase)
{
    f->plan.stage_count = 77;
    const fl_status status = planner_plan(&f->request, &f->plan);
    if (strstr(fl_last_error(), phrase) == NULL) {
        printf("  \"%s\" does not say \"%s\"\n", fl_last_error(), phrase);
    }
    CHECK_EQ(status, want);
    CHECK_EQ(f->plan.stage_count, 77); /* written only on success */
    CHECK(strstr(fl_last_error(), phrase) != NULL);
}

static void test_equal_nodes_get_equal_shares(void)
{
    static struct fixture f;
    fixture_init(&f, 30, 1, false);
    add_node(&f, "a", 1024, 64);
    add_node(&f, "b", 1024, 64);
    add_node(&f, "c", 1024, 64);
    check_plans(&f);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(f.plan.stages[i].layer_count, 10);
    }
    CHECK_EQ(f.plan.stages[1].shard_size, 80 * MIB);
    CHECK_EQ(f.plan.stages[0].shard_size, 81 * MIB); /* and the embedding */
    CHECK(f.plan.stages[1].overhead_size > PLANNER_OVERHEAD_SIZE);
}

static void test_shares_follow_memory(void)
{
    static struct fixture f;
    fixture_init(&f, 40, 1, false);
    add_node(&f, "small", 400, 0);
    add_node(&f, "large", 1200, 0);
    check_plans(&f);
    const uint32_t small = f.plan.stages[0].layer_count;
    CHECK(small >= 6 && small <= 11);
}

static void test_the_head_is_a_load_and_the_embedding_is_none(void)
{
    static struct fixture f;
    fixture_init(&f, 20, 80, false); /* each as much as ten layers */
    add_node(&f, "a", 16384, 0);
    add_node(&f, "b", 16384, 0);
    add_node(&f, "c", 16384, 0);
    check_plans(&f);
    CHECK_EQ(f.plan.stages[0].layer_count + f.plan.stages[1].layer_count, 19);
    CHECK(f.plan.stages[0].layer_count >= 9 && f.plan.stages[1].layer_count >= 9);
    CHECK_EQ(f.plan.stages[2].layer_count, 1);
    CHECK_EQ(f.plan.stages[0].shard_size, 80u * MIB + 8u * MIB * f.plan.stages[0].layer_count);
    CHECK_EQ(f.plan.stages[2].shard_size, 80u * MIB + 8u * MIB);
}

static void test_the_embedding_takes_memory_all_the_same(void)
{
    static struct fixture f;
    fixture_init(&f, 20, 80, false);
    add_node(&f, "narrow", 140, 0); /* room for the table and a layer or two */
    add_node(&f, "b", 1024, 0);
    add_node(&f, "c", 1024, 0);
    check_plans(&f);
    CHECK(f.plan.stages[0].layer_count <= 2);
    CHECK(f.plan.stages[1].layer_count > f.plan.stages[2].layer_count);
    f.nodes[0].memory_size = 115u * MIB;
    check_plans(&f);
    CHECK_EQ(f.plan.left_out_count, 1);
    CHECK_EQ(f.plan.left_out[0].node, 0);
}

static void test_tied_head_counts_once_on_its_own_node(void)
{
    static struct fixture f;
    fixture_init(&f, 4, 100, true);
    add_node(&f, "alone", 1024, 0);
    check_plans(&f);
    CHECK_EQ(f.plan.stages[0].shard_size, 132 * MIB);
    fixture_init(&f, 4, 100, false);
    add_node(&f, "alone", 1024, 0);
    check_plans(&f);
    CHECK_EQ(f.plan.stages[0].shard_size, 232 * MIB);
    fixture_init(&f, 4, 100, true);
    add_node(&f, "a", 1024, 0);
    add_node(&f, "b", 1024, 0);
    check_plans(&f);
    CHECK_EQ(f.plan.stages[0].shard_size + f.plan.stages[1].shard_size, 232 * MIB);
}

static void test_what_the_fullest_node_leaves_open_is_spread_evenly(void)
{
    static struct fixture f;
    fixture_init(&f, 18, 200, false);
    for (int i = 0; i < 4; i++) {
        add_node(&f, "n", 1024, 0);
    }
    check_plans(&f);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK(f.plan.stages[i].layer_count >= 5 && f.plan.stages[i].layer_count <= 6);
    }
    CHECK_EQ(f.plan.stages[3].layer_count, 1);
}

static void test_every_node_is_used_when_there_are_layers_enough(void)
{
    static struct fixture f;
    for (uint32_t nodes = 1; nodes <= 8; nodes++) {
        fixture_init(&f, 8, 1, true);
        for (uint32_t i = 0; i < nodes; i++) {
            add_node(&f, "n", 4096, 1024);
        }
        check_plans(&f);
        CHECK_EQ(f.plan.stage_count, nodes);
    }
}

static void test_more_nodes_than_layers_leaves_some_out(void)
{
    static struct fixture f;
    fixture_init(&f, 2, 1, true);
    for (int i = 0; i < 5; i++) {
        add_node(&f, "n", 1024, 0);
    }
    check_plans(&f);
    CHECK_EQ(f.plan.stage_count, 2);
    CHECK_EQ(f.plan.left_out_count, 3);
    CHECK_EQ(f.plan.left_out[0].missing_size, 0);
}

static void test_node_too_small_for_a_layer_is_left_out(void)
{
    static struct fixture f;
    fixture_init(&f, 10, 1, true);
    add_node(&f, "a", 1024, 0);
    add_node(&f, "tiny", 36, 0);
    add_node(&f, "c", 1024, 0);
    check_plans(&f);
    CHECK_EQ(f.plan.stage_count, 2);
    CHECK_EQ(f.plan.left_out_count, 1);
    CHECK_EQ(f.plan.left_out[0].node, 1);
    CHECK(f.plan.left_out[0].missing_size > 0 && f.plan.left_out[0].missing_size < 64u * MIB);

    /* Large enough for a layer, but not for the embedding that goes with the first. */
    fixture_init(&f, 10, 200, true);
    add_node(&f, "narrow", 100, 0);
    add_node(&f, "wide", 1024, 0);
    check_plans(&f);
    CHECK_EQ(f.plan.stages[0].node, 1);
    CHECK_EQ(f.plan.left_out[0].node, 0);
}

static void test_kv_blocks_are_the_same_everywhere(void)
{
    static struct fixture f;
    fixture_init(&f, 8, 1, true);
    add_node(&f, "a", 1024, 512);
    add_node(&f, "b", 1024, 16); /* 4 layers x 32 KiB a block: 128 blocks */
    check_plans(&f);
    CHECK_EQ(f.plan.stages[1].layer_count, 4);
    CHECK_EQ(f.plan.kv_block_count, 128);
    f.nodes[1].kv_size_max = 0; /* no more than context_min needs */
    check_plans(&f);
    CHECK_EQ(f.plan.kv_block_count, 32);
    f.request.context_min = 33;
    check_plans(&f);
    CHECK_EQ(f.plan.kv_block_count, 2);
}

static void test_refusal_says_how_much_is_missing_where(void)
{
    static struct fixture f;
    fixture_init(&f, 30, 10, false);
    add_node(&f, "box-a", 128, 0);
    add_node(&f, "box-b", 100, 0);
    check_refused(&f, FL_NO_MEMORY, "model toy does not fit with 1024 positions");
    CHECK(strstr(fl_last_error(), "are missing on node box-b") != NULL);
    CHECK(strstr(fl_last_error(), "free memory") != NULL);
    CHECK(strstr(fl_last_error(), "box-a (128.0 MiB) holds layers 0 to") != NULL);
    /* As much more as it says is enough, and a little less is not. */
    const char *number = strstr(fl_last_error(), "context: ");
    CHECK(number != NULL);
    const double missing = strtod(number + 9, NULL);
    CHECK(missing > 100 && missing < 250);
    f.nodes[1].memory_size += (uint64_t)((missing + 0.1) * MIB);
    check_plans(&f);
    f.nodes[1].memory_size -= (uint64_t)(1.0 * MIB);
    check_refused(&f, FL_NO_MEMORY, "missing on node box-b");
    /* The KV cache alone can be what does not fit. */
    fixture_init(&f, 30, 10, false);
    add_node(&f, "box-a", 4096, 10);
    check_refused(&f, FL_NO_MEMORY, "20.0 MiB are missing on node box-a");
    CHECK(strstr(fl_last_error(), "raise --kv-budget") != NULL);
}

static void test_long_refusals_are_cut_not_broken(void)
{
    static struct fixture f;
    fixture_init(&f, 30, 10, false);
    for (int i = 0; i < FL_STAGE_COUNT_MAX; i++) {
        add_node(&f, "a-node-with-quite-a-long-name-as-names-go", 33, 0);
    }
    check_refused(&f, FL_NO_MEMORY, "holds nothing");
}

static void test_explicit_split_is_obeyed(void)
{
    static struct fixture f;
    fixture_init(&f, 30, 1, true);
    add_node(&f, "a", 1024, 0);
    add_node(&f, "b", 1024, 0);
    add_node(&f, "c", 1024, 0);
    f.request.split = f.split;
    f.split[0] = 5;
    f.split[2] = 25;
    check_plans(&f);
    CHECK_EQ(f.plan.stage_count, 2);
    CHECK_EQ(f.plan.stages[0].layer_count, 5);
    CHECK_EQ(f.plan.stages[1].layer_count, 25);
    CHECK_EQ(f.plan.left_out[0].node, 1);
    f.split[2] = 24;
    check_refused(&f, FL_INVALID, "the split has 29 layers; model toy has 30");
    f.split[1] = UINT32_MAX;
    check_refused(&f, FL_INVALID, "model toy has 30");
    f.split[1] = 1;
    f.nodes[2].memory_size = 200u * MIB;
    check_refused(&f, FL_NO_MEMORY, "node c needs");
}

static void test_impossible_requests_are_refused(void)
{
    static struct fixture f;
    fixture_init(&f, 3, 1, true);
    check_refused(&f, FL_NOT_FOUND, "no node has joined");
    add_node(&f, "a", 1024, 0);
    f.request.context_min = 4097;
    check_refused(&f, FL_TOO_LARGE, "4097 positions");
    f.request.context_min = 0;
    check_refused(&f, FL_TOO_LARGE, "0 positions");
    f.request.context_min = 4096;
    check_plans(&f);
    f.request.node_count = FL_STAGE_COUNT_MAX + 1;
    check_refused(&f, FL_TOO_LARGE, "65 nodes");
}

static void test_plans_are_sound_for_any_nodes(void)
{
    static struct fixture f;
    uint32_t planned = 0;
    uint64_t state = 1;
    for (int trial = 0; trial < 300; trial++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        fixture_init(&f, 1 + (uint32_t)(state >> 33) % 40, 1 + (uint32_t)(state >> 40) % 60,
                     (state >> 60 & 1) != 0);
        const uint32_t nodes = 1 + (uint32_t)(state >> 50) % 7;
        for (uint32_t i = 0; i < nodes; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            add_node(&f, "n", 30 + (state >> 40) % 400, (state >> 20) % 3 * 20);
        }
        const fl_status status = planner_plan(&f.request, &f.plan);
        CHECK(status == FL_OK || status == FL_NO_MEMORY);
        if (status == FL_OK) {
            const struct planner_plan first = f.plan;
            check_sound(&f);
            CHECK_EQ(planner_plan(&f.request, &f.plan), FL_OK);
            CHECK(memcmp(&first.stages, &f.plan.stages, sizeof(first.stages)) == 0);
            planned++;
        }
    }
    CHECK(planned > 50 && planned < 300);
}

static const struct test_case cases[] = {
    {"planner: equal nodes get equal shares", test_equal_nodes_get_equal_shares},
    {"planner: shares follow memory", test_shares_follow_memory},
    {"planner: the head is a load and the embedding is none",
     test_the_head_is_a_load_and_the_embedding_is_none},
    {"planner: the embedding takes memory all the same",
     test_the_embedding_takes_memory_all_the_same},
    {"planner: tied head counts once on its own node", test_tied_head_counts_once_on_its_own_node},
    {"planner: what the fullest node leaves open is spread evenly",
     test_what_the_fullest_node_leaves_open_is_spread_evenly},
    {"planner: every node is used when there are layers enough",
     test_every_node_is_used_when_there_are_layers_enough},
    {"planner: more nodes than layers leaves some out",
     test_more_nodes_than_layers_leaves_some_out},
    {"planner: node too small for a layer is left out",
     test_node_too_small_for_a_layer_is_left_out},
    {"planner: KV blocks are the same everywhere", test_kv_blocks_are_the_same_everywhere},
    {"planner: refusal says how much is missing where",
     test_refusal_says_how_much_is_missing_where},
    {"planner: long refusals are cut, not broken", test_long_refusals_are_cut_not_broken},
    {"planner: explicit split is obeyed", test_explicit_split_is_obeyed},
    {"planner: impossible requests are refused", test_impossible_requests_are_refused},
    {"planner: plans are sound for any nodes", test_plans_are_sound_for_any_nodes},
};

TEST_MAIN(cases)
