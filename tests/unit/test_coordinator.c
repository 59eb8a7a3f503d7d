/* test_coordinator.c - the whole coordinator against nodes that only pretend. */
#include "tests/support/coordinator_bench.h"

static void without_nodes_the_error_says_how_to_start_one(void)
{
    open_bench(0, PLAIN);
    expect_error(generate("hello", 4, NULL), FL_NOT_FOUND, "firstlight-node --join");
}

static void plan_and_admit_go_out_at_once(void)
{
    open_bench(2, PLAIN);
    const uint64_t id = generate("hello", 4, NULL);
    for (uint32_t i = 0; i < 2; i++) {
        const struct told *plan = last_told(&bench.nodes[i], FL_MESSAGE_PLAN);
        CHECK(plan != NULL && plan->stage_index == i);
        CHECK(plan->piece_count >= 3);
        const struct told *admit = last_told(&bench.nodes[i], FL_MESSAGE_ADMIT);
        CHECK(admit != NULL); /* nobody said that a piece is loaded */
        CHECK_EQ(admit->prompt_count, admit->token_count);
        CHECK_EQ(admit->position_max, admit->prompt_count + 4);
        CHECK_EQ(admit->keep, 0);
    }
    CHECK_EQ(last_event(id)->kind, FL_EVENT_ADMITTED);
    CHECK_EQ(last_event(id)->class_, FL_CLASS_COLD);
    local_network_advance(bench.network, 1050 * FL_NS_PER_MS);
    sample(1, 0, 'a', FL_FINISH_NONE);
    CHECK_EQ(last_event(id)->kind, FL_EVENT_TEXT);
    CHECK(strcmp(last_event(id)->text, "a") == 0);
    sample(1, 1, 'b', FL_FINISH_NONE);
    sample(1, 2, 0, FL_FINISH_STOP);
    const struct seen_event *done = last_event(id);
    CHECK_EQ(done->kind, FL_EVENT_DONE);
    CHECK_EQ(done->finish, FL_FINISH_STOP);
    CHECK_EQ(done->output_tokens, 2); /* the end token is not counted */
    CHECK_EQ(done->stage_count, 2);
    CHECK(done->ttft_ms > 1.0 && done->ttft_ms < 60.0);
    for (uint32_t i = 0; i < 2; i++) {
        const struct told *end = last_told(&bench.nodes[i], FL_MESSAGE_END);
        CHECK(end != NULL);
        CHECK_EQ(end->keep, done->prompt_tokens + 2);
    }
}

static void middle_stages_get_no_tokens(void)
{
    open_bench(3, PLAIN);
    generate("hello", 4, NULL);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->token_count > 0);
    CHECK_EQ(last_told(&bench.nodes[1], FL_MESSAGE_ADMIT)->token_count, 0);
    CHECK(last_told(&bench.nodes[1], FL_MESSAGE_ADMIT)->prompt_count > 0);
    CHECK(last_told(&bench.nodes[2], FL_MESSAGE_ADMIT)->token_count > 0);
}

enum { LISTED_ENDS = 30, LISTED_FIRST = 100 };

static void put_many_ends(struct gguf_buffer *buffer, void *ctx)
{
    uint32_t ids[LISTED_ENDS];
    (void)ctx;
    for (uint32_t i = 0; i < LISTED_ENDS; i++) {
        ids[i] = LISTED_FIRST + i;
    }
    gguf_put_key_uints(buffer, "tokenizer.ggml.eos_token_ids", GGUF_INT32, ids, LISTED_ENDS);
}

/* The last stage stops at them, so it must hear of all: those of the chat come last, by id. */
static void every_end_token_is_told(void)
{
    open_bench(2, PLAIN);
    char path[TEMP_PATH_MAX];
    struct model_spec spec = model_spec_tiny(FL_ARCHITECTURE_LLAMA, FL_DTYPE_Q4_0);
    spec.more_keys = put_many_ends;
    temp_folder_path(&bench.folder, "ends.gguf", path);
    CHECK_EQ(model_write(&spec, path), FL_OK);
    generate_of("ends", "hello", 4, NULL);
    const struct told *admit = last_told(&bench.nodes[1], FL_MESSAGE_ADMIT);
    CHECK(admit != NULL && admit->stop_count > LISTED_ENDS); /* EOS is another */
    for (uint32_t id = LISTED_FIRST; id < LISTED_FIRST + LISTED_ENDS; id++) {
        bool told = false;
        for (uint32_t i = 0; i < admit->stop_count; i++) {
            told = told || admit->stop_tokens[i] == id;
        }
        CHECK(told);
    }
}

static void the_next_turn_prefills_what_is_new(void)
{
    open_bench(1, PLAIN);
    uint64_t id = generate("hello", 4, NULL);
    const uint64_t sequence = last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->sequence_id;
    const uint32_t prompt = last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->prompt_count;
    sample(0, 0, 'x', FL_FINISH_NONE);
    sample(0, 1, 'y', FL_FINISH_NONE);
    sample(0, 2, 'z', FL_FINISH_LENGTH);
    CHECK_EQ(last_event(id)->finish, FL_FINISH_LENGTH);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_END)->keep, prompt + 2);
    id = generate("helloxyzq", 4, NULL);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->sequence_id, sequence);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->keep, prompt + 2);
    CHECK_EQ(last_event(id)->cached_tokens, prompt + 2);
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_PLAN), 1);
}

static void a_stop_string_ends_the_request_everywhere(void)
{
    open_bench(2, PLAIN);
    const uint64_t id = generate("hello", 20, "YZ");
    sample(1, 0, 'x', FL_FINISH_NONE);
    sample(1, 1, 'Y', FL_FINISH_NONE);
    CHECK(strcmp(last_event(id)->text, "") == 0); /* held back: it may be the stop string */
    sample(1, 2, 'Z', FL_FINISH_NONE);
    CHECK_EQ(last_event(id)->kind, FL_EVENT_DONE);
    CHECK_EQ(last_event(id)->finish, FL_FINISH_STOP);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_END) != NULL);
    const uint32_t events = bench.event_count;
    sample(1, 3, 'q', FL_FINISH_NONE); /* late: it was under way */
    CHECK_EQ(bench.event_count, events);
}

static void held_text_is_released_at_the_end(void)
{
    open_bench(1, PLAIN);
    const uint64_t id = generate("hello", 2, "YZ");
    sample(0, 0, 'x', FL_FINISH_NONE);
    sample(0, 1, 'Y', FL_FINISH_LENGTH);
    CHECK_EQ(last_event(id)->kind, FL_EVENT_DONE);
    CHECK(strcmp(bench.events[bench.event_count - 2].text, "Y") == 0);
    CHECK_EQ(bench.events[bench.event_count - 2].token_id, UINT32_MAX);
}

static void cancelling_ends_with_done_and_a_vanished_client_with_nothing(void)
{
    open_bench(1, PLAIN);
    const uint64_t id = generate("hello", 20, NULL);
    struct fl_client_request cancel = {.kind = FL_REQUEST_CANCEL};
    cancel.as.cancel.id = id;
    ask(2, &cancel); /* somebody else's */
    CHECK_EQ(last_event(id)->kind, FL_EVENT_ADMITTED);
    ask(1, &cancel);
    CHECK_EQ(last_event(id)->kind, FL_EVENT_DONE);
    CHECK_EQ(last_event(id)->finish, FL_FINISH_CANCELLED);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_END)->keep, 0);
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_DROP), 1);
    generate("hello", 20, NULL);
    coordinator_client_gone(bench.coordinator, 1);
    settle();
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_END), 2);
}

static void a_cancelled_load_ends_with_done_and_the_model_goes_on_loading(void)
{
    open_bench(2, PLAIN);
    const uint64_t id = by_model(FL_REQUEST_LOAD, "m");
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_PLAN) != NULL);
    struct fl_client_request cancel = {.kind = FL_REQUEST_CANCEL};
    cancel.as.cancel.id = id;
    ask(1, &cancel);
    CHECK_EQ(last_event(id)->kind, FL_EVENT_DONE);
    CHECK_EQ(last_event(id)->finish, FL_FINISH_CANCELLED);
    CHECK_EQ(last_event(id)->stage_count, 2);
    load_all();
    CHECK_EQ(last_event(id)->kind, FL_EVENT_DONE); /* and no LOADED behind it */
    const uint64_t again = by_model(FL_REQUEST_LOAD, "m");
    CHECK_EQ(last_event(again)->kind, FL_EVENT_LOADED);
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_PLAN), 1);
}

static void refusals_carry_the_number_that_would_fit(void)
{
    open_bench(1, PLAIN);
    char prompt[200];
    memset(prompt, 'a', sizeof(prompt));
    prompt[199] = '\0';
    expect_error(generate(prompt, 4, NULL), FL_TOO_LARGE, "at most 63 fit");
    expect_error(generate("abcd", 100, NULL), FL_TOO_LARGE, "new tokens fit");
    expect_error(generate("\xff", 4, NULL), FL_INVALID, "UTF-8");
    const uint64_t id = generate("abcd", 0, NULL); /* what the context has left */
    CHECK_EQ(last_event(id)->kind, FL_EVENT_ADMITTED);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_ADMIT)->position_max, 64);
    struct fl_client_request request = {.kind = FL_REQUEST_GENERATE};
    uint32_t tokens[] = {1, 1000000};
    request.as.generate.model = "m";
    request.as.generate.token_count = 2;
    request.as.generate.tokens = tokens;
    ask(1, &request);
    expect_error(request.id, FL_INVALID, "1000000");
    request.as.generate.token_count = 0;
    ask(1, &request);
    expect_error(request.id, FL_INVALID, "no prompt");
    request.as.generate.model = "";
    ask(1, &request);
    expect_error(request.id, FL_INVALID, "no model");
    expect_error(by_model(FL_REQUEST_LOAD, "nosuch"), FL_NOT_FOUND, "there is: broken, m");
    expect_error(by_model(FL_REQUEST_LOAD, "broken"), FL_MALFORMED, "");
}

static void the_queue_is_bounded_and_says_why(void)
{
    struct coordinator_settings settings = PLAIN;
    settings.sequences = 1;
    settings.queue = 1;
    open_bench(1, settings);
    const uint64_t first = generate("one", 20, NULL);
    const uint64_t second = generate("two", 20, NULL);
    CHECK_EQ(last_event(second)->kind, FL_EVENT_PROGRESS);
    CHECK(strstr(last_event(second)->text, "queue the KV cache") != NULL);
    const uint64_t third = generate("three", 20, NULL);
    expect_error(third, FL_BUSY, "queue is full");
    CHECK(last_event(third)->retry_ms > 0);
    sample(0, 0, 'x', FL_FINISH_LENGTH);
    CHECK_EQ(last_event(first)->kind, FL_EVENT_DONE);
    CHECK_EQ(last_event(second)->kind, FL_EVENT_ADMITTED);
    CHECK_EQ(told_count(&bench.nodes[0], FL_MESSAGE_DROP), 1); /* the first one's conversation */
}

static void a_lost_node_ends_its_requests_and_the_next_plan_goes_without_it(void)
{
    open_bench(2, PLAIN);
    const uint64_t id = generate("hello", 20, NULL);
    const uint64_t plan = last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->plan_id;
    sample(1, 0, 'x', FL_FINISH_NONE);
    leave(1);
    settle();
    expect_error(id, FL_NODE_LOST, "node box2 was lost");
    CHECK(last_event(id)->retry_ms > 0);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_UNPLAN)->plan_id, plan);
    const uint64_t next = generate("hello", 20, NULL);
    CHECK_EQ(last_event(next)->kind, FL_EVENT_ADMITTED);
    CHECK_EQ(last_event(next)->class_, FL_CLASS_COLD);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->plan_id > plan);
    sample(0, 0, 'x', FL_FINISH_LENGTH);
    CHECK_EQ(last_event(next)->stage_count, 1);
}

static void failures_of_a_request_and_of_a_plan_are_told_apart(void)
{
    open_bench(2, PLAIN);
    const uint64_t first = generate("one", 20, NULL);
    const struct told admit = *last_told(&bench.nodes[0], FL_MESSAGE_ADMIT);
    const uint64_t second = generate("two", 20, NULL);
    struct fl_cluster_message message = {.kind = FL_MESSAGE_FAILURE};
    message.as.failure = (struct fl_failure){.plan_id = admit.plan_id,
                                             .request_id = admit.request_id,
                                             .code = FL_NO_MEMORY,
                                             .text = "no blocks"};
    say(&bench.nodes[0], &message);
    settle();
    expect_error(first, FL_NO_MEMORY, "node box1: no blocks");
    CHECK_EQ(last_event(second)->kind, FL_EVENT_ADMITTED);
    message.as.failure.request_id = 0;
    message.as.failure.code = FL_IO;
    snprintf(message.as.failure.text, sizeof(message.as.failure.text), "disk gone");
    say(&bench.nodes[1], &message);
    settle();
    expect_error(second, FL_IO, "node box2: disk gone");
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_UNPLAN) != NULL);
    CHECK(last_told(&bench.nodes[1], FL_MESSAGE_UNPLAN) != NULL);
    /* A plan that is gone, and tokens from where none come from: nothing happens. */
    say(&bench.nodes[1], &message);
    settle();
    CHECK_EQ(last_event(generate("three", 20, NULL))->kind, FL_EVENT_ADMITTED);
}

static void classes_follow_what_is_loaded(void)
{
    open_bench(2, PLAIN);
    const uint64_t load = by_model(FL_REQUEST_LOAD, "m");
    CHECK_EQ(last_event(load)->kind, FL_EVENT_PROGRESS);
    load_progress(0, 1);
    CHECK_EQ(last_event(generate("one", 4, NULL))->class_, FL_CLASS_PARTIAL);
    load_all();
    CHECK_EQ(last_event(load)->kind, FL_EVENT_LOADED);
    CHECK_EQ(last_event(generate("two", 4, NULL))->class_, FL_CLASS_WARM);
    expect_error(by_model(FL_REQUEST_UNLOAD, "m"), FL_BUSY, "2 requests");
    coordinator_client_gone(bench.coordinator, 1);
    CHECK_EQ(last_event(by_model(FL_REQUEST_UNLOAD, "m"))->kind, FL_EVENT_UNLOADED);
    CHECK(last_told(&bench.nodes[1], FL_MESSAGE_UNPLAN) != NULL);
    expect_error(by_model(FL_REQUEST_UNLOAD, "m"), FL_NOT_FOUND, "not loaded");
    CHECK_EQ(last_event(generate("three", 4, NULL))->class_, FL_CLASS_COLD);
}

static void plans_status_models_and_tokens_are_shown(void)
{
    open_bench(2, PLAIN);
    uint64_t id = by_model(FL_REQUEST_PLAN, "m");
    CHECK_EQ(last_event(id)->kind, FL_EVENT_PLAN);
    CHECK_EQ(last_event(id)->stage_count, 2);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_PLAN) == NULL); /* nothing is loaded by it */
    id = by_model(FL_REQUEST_STATUS, NULL);
    CHECK_EQ(last_event(id)->count, 2);
    CHECK_EQ(last_event(id)->stage_count, 0);
    id = by_model(FL_REQUEST_MODELS, NULL);
    CHECK_EQ(last_event(id)->count, 2);
    CHECK(strncmp(last_event(id)->text, "broken ", 7) == 0 && strlen(last_event(id)->text) > 10);
    struct fl_client_request request = {.kind = FL_REQUEST_TOKENIZE};
    request.as.tokenize.model = "m";
    request.as.tokenize.text = (struct fl_text){"abc", 3};
    ask(1, &request);
    CHECK_EQ(last_event(request.id)->kind, FL_EVENT_TOKENS);
    CHECK(last_event(request.id)->count >= 1);
    request = (struct fl_client_request){.version = 99, .id = 1000, .kind = FL_REQUEST_STATUS};
    coordinator_request(bench.coordinator, 1, &request);
    expect_error(1000, FL_UNSUPPORTED, "99");
}

static void a_split_is_followed(void)
{
    struct coordinator_settings settings = PLAIN;
    settings.split_count = 2;
    settings.split[0] = 1;
    settings.split[1] = 2;
    open_bench(1, settings);
    expect_error(generate("one", 4, NULL), FL_INVALID, "1 nodes have joined");
    join_as(1, "box2", 55);
    generate("one", 4, NULL);
    CHECK_EQ(last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->piece_count, 3); /* embed and a layer */
    CHECK_EQ(last_told(&bench.nodes[1], FL_MESSAGE_PLAN)->piece_count, 5);
}

static void ranges_of_loaded_models_are_served(void)
{
    open_bench(1, PLAIN);
    generate("one", 4, NULL);
    struct fl_range ranges[] = {{0, 4}, {100, 60}};
    struct fl_cluster_message message = {.kind = FL_MESSAGE_FETCH};
    struct fl_fetch *fetch = &message.as.fetch;
    *fetch = (struct fl_fetch){.transfer_id = 9, .model = "m", .range_count = 2, .ranges = ranges};
    const struct fl_manifest *manifest = &last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->manifest;
    memcpy(fetch->identity, manifest->identity, sizeof(fetch->identity));
    struct fake_node *node = &bench.nodes[0];
    say(node, &message);
    settle();
    CHECK_EQ(node->fetched.transfer_id, 9);
    CHECK_EQ(node->fetched.status, FL_OK);
    CHECK_EQ(node->fetched.size, 64);
    CHECK_EQ(memcmp(node->fetched_data, "GGUF", 4), 0);
    CHECK_EQ(node->fetched.checksum, fl_checksum64(node->fetched_data, 64));

    fetch->transfer_id = 10;
    ranges[1].offset = manifest->files[0].size - 10; /* beyond the end */
    say(node, &message);
    settle();
    CHECK_EQ(node->fetched.transfer_id, 10);
    CHECK_EQ(node->fetched.status, FL_INVALID);
    CHECK(strstr((const char *)node->fetched_data, "beyond its end") != NULL);

    fetch->transfer_id = 11;
    ranges[1].offset = 0;
    fetch->file = 1;
    say(node, &message);
    settle();
    CHECK_EQ(node->fetched.transfer_id, 11);
    CHECK_EQ(node->fetched.status, FL_INVALID);

    fetch->transfer_id = 12;
    fetch->file = 0;
    fetch->identity[0] ^= 1; /* another conversion of the model */
    say(node, &message);
    settle();
    CHECK_EQ(node->fetched.transfer_id, 12);
    CHECK_EQ(node->fetched.status, FL_NOT_FOUND);
}

static void a_file_cut_while_it_is_served_is_an_error_and_no_crash(void)
{
    open_bench(1, PLAIN);
    generate("one", 4, NULL);
    temp_folder_put(&bench.folder, "m.gguf", "GGUF", 4);
    struct fl_range range = {100, 60};
    struct fl_cluster_message message = {.kind = FL_MESSAGE_FETCH};
    message.as.fetch =
        (struct fl_fetch){.transfer_id = 3, .model = "m", .range_count = 1, .ranges = &range};
    memcpy(message.as.fetch.identity,
           last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->manifest.identity, FL_IDENTITY_SIZE);
    say(&bench.nodes[0], &message);
    settle();
    CHECK_EQ(bench.nodes[0].fetched.transfer_id, 3);
    CHECK_EQ(bench.nodes[0].fetched.status, FL_IO);
    /* Unloaded and loaded again, the file is looked at anew. */
    coordinator_client_gone(bench.coordinator, 1);
    by_model(FL_REQUEST_UNLOAD, "m");
    const struct seen_event *event = last_event(generate("one", 4, NULL));
    CHECK_EQ(event->kind, FL_EVENT_ERROR);
}

static void the_same_name_twice_is_refused_with_a_sentence(void)
{
    open_bench(1, PLAIN);
    join_as(1, "box1", 999);
    CHECK(!bench.nodes[1].welcomed);
    CHECK(strstr(bench.nodes[1].refusal, "is taken") != NULL);
    CHECK(!bench.nodes[1].up);
    CHECK_EQ(last_event(generate("one", 4, NULL))->kind, FL_EVENT_ADMITTED);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_ADMIT) != NULL);
}

/* Nodes outlive a coordinator, and so do their messages about its plans. */
static void another_coordinator_uses_other_plan_ids(void)
{
    open_bench(1, PLAIN);
    generate("one", 4, NULL);
    const uint64_t first = last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->plan_id;
    open_bench(1, PLAIN);
    generate("one", 4, NULL);
    CHECK(last_told(&bench.nodes[0], FL_MESSAGE_PLAN)->plan_id != first);
}

static void stopping_tells_everybody(void)
{
    open_bench(1, PLAIN);
    const uint64_t id = generate("one", 4, NULL);
    coordinator_end_requests(bench.coordinator, "the coordinator is stopping");
    expect_error(id, FL_CANCELLED, "stopping");
    close_bench();
}

static const struct test_case cases[] = {
    {"coordinator: without nodes the error says how to start one",
     without_nodes_the_error_says_how_to_start_one},
    {"coordinator: plan and admit go out at once, before anything is loaded",
     plan_and_admit_go_out_at_once},
    {"coordinator: middle stages get no tokens", middle_stages_get_no_tokens},
    {"coordinator: every end token is told", every_end_token_is_told},
    {"coordinator: the next turn prefills what is new", the_next_turn_prefills_what_is_new},
    {"coordinator: a stop string ends the request everywhere, late tokens are ignored",
     a_stop_string_ends_the_request_everywhere},
    {"coordinator: held text is released at the end", held_text_is_released_at_the_end},
    {"coordinator: cancelling ends with done and a vanished client with nothing",
     cancelling_ends_with_done_and_a_vanished_client_with_nothing},
    {"coordinator: a cancelled load ends with done and the model goes on loading",
     a_cancelled_load_ends_with_done_and_the_model_goes_on_loading},
    {"coordinator: refusals carry the number that would fit",
     refusals_carry_the_number_that_would_fit},
    {"coordinator: the queue is bounded and says why", the_queue_is_bounded_and_says_why},
    {"coordinator: a lost node ends its requests and the next plan goes without it",
     a_lost_node_ends_its_requests_and_the_next_plan_goes_without_it},
    {"coordinator: failures of a request and of a plan are told apart",
     failures_of_a_request_and_of_a_plan_are_told_apart},
    {"coordinator: classes follow what is loaded", classes_follow_what_is_loaded},
    {"coordinator: plans, status, models and tokens are shown",
     plans_status_models_and_tokens_are_shown},
    {"coordinator: a split is followed", a_split_is_followed},
    {"coordinator: ranges of loaded models are served", ranges_of_loaded_models_are_served},
    {"coordinator: a file cut while it is served is an error and no crash",
     a_file_cut_while_it_is_served_is_an_error_and_no_crash},
    {"coordinator: the same name twice is refused with a sentence",
     the_same_name_twice_is_refused_with_a_sentence},
    {"coordinator: another coordinator uses other plan ids",
     another_coordinator_uses_other_plan_ids},
    {"coordinator: stopping tells everybody", stopping_tells_everybody},
};

TEST_MAIN(cases)
