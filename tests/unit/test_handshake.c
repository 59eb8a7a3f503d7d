/* The handshake: every combination of keys, replays, other versions, and garbage. */
#include "proto/handshake.h"

#include <stdbool.h>

#include "proto/base/log.h"
#include "proto/cluster_message.h"
#include "tests/harness.h"

struct record {
    unsigned char bytes[FL_HANDSHAKE_RECORD_MAX];
    size_t size;
};

static struct fl_pool_key key_a, key_b;

static void pair_init(struct fl_handshake *opener, struct fl_handshake *answerer,
                      const struct fl_pool_key *opener_key, const struct fl_pool_key *answerer_key)
{
    fl_pool_key_make(&key_a);
    fl_pool_key_make(&key_b);
    fl_handshake_init(opener, FL_PARTY_NODE, true, opener_key);
    fl_handshake_init(answerer, FL_PARTY_COORDINATOR, false, answerer_key);
}

static fl_status take(struct fl_handshake *handshake, const struct record *in, struct record *out)
{
    return fl_handshake_take(handshake, in->bytes, in->size, out->bytes, &out->size);
}

/* Both sides up to the end; CHECKs the good way. */
static void shake(struct fl_handshake *opener, struct fl_handshake *answerer)
{
    struct record hello, challenge, proof, welcome, none;
    fl_handshake_hello(opener, hello.bytes, &hello.size);
    CHECK(fl_handshake_is_record(hello.bytes, hello.size));
    CHECK_EQ(take(answerer, &hello, &challenge), FL_AGAIN);
    CHECK_EQ(take(opener, &challenge, &proof), FL_AGAIN);
    CHECK_EQ(take(answerer, &proof, &welcome), FL_OK);
    CHECK_EQ(take(opener, &welcome, &none), FL_OK);
    CHECK_EQ(none.size, 0);
    CHECK_EQ(opener->peer_party, FL_PARTY_COORDINATOR);
    CHECK_EQ(answerer->peer_party, FL_PARTY_NODE);
}

static void test_no_keys(void)
{
    struct fl_handshake opener, answerer;
    pair_init(&opener, &answerer, NULL, NULL);
    shake(&opener, &answerer);
}

static void test_same_key(void)
{
    struct fl_handshake opener, answerer;
    pair_init(&opener, &answerer, &key_a, &key_a);
    shake(&opener, &answerer);
}

static void test_answerer_needs_key(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, refused, none;
    pair_init(&opener, &answerer, NULL, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&answerer, &hello, &refused), FL_DENIED);
    CHECK(strstr(fl_last_error(), "node has no pool key") != NULL);
    CHECK(refused.size > 0);
    CHECK_EQ(take(&opener, &refused, &none), FL_DENIED);
    CHECK(strstr(fl_last_error(), "refused by the coordinator") != NULL);
    CHECK(strstr(fl_last_error(), "give it the key file") != NULL);
    CHECK_EQ(none.size, 0);
}

static void test_opener_needs_key(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, refused, none;
    pair_init(&opener, &answerer, &key_a, NULL);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&answerer, &hello, &refused), FL_DENIED);
    CHECK(strstr(fl_last_error(), "this coordinator has none") != NULL);
    CHECK_EQ(take(&opener, &refused, &none), FL_DENIED);
}

/* An answerer that claims no key to an opener that has one. */
static void test_opener_refuses_keyless(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, challenge, refused;
    pair_init(&opener, &answerer, NULL, NULL);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&answerer, &hello, &challenge), FL_AGAIN);
    fl_handshake_init(&opener, FL_PARTY_NODE, true, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&opener, &challenge, &refused), FL_DENIED);
    CHECK(refused.size > 0);
}

static void test_other_key(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, challenge, refused, none;
    pair_init(&opener, &answerer, &key_a, &key_b);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&answerer, &hello, &challenge), FL_AGAIN);
    CHECK_EQ(take(&opener, &challenge, &refused), FL_DENIED);
    CHECK(strstr(fl_last_error(), "another pool key") != NULL);
    CHECK_EQ(take(&answerer, &refused, &none), FL_DENIED);
    CHECK(strstr(fl_last_error(), "refused by the node") != NULL);
}

/* An opener without the right key that goes on all the same. */
static void test_forged_proof(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, challenge, proof, refused;
    pair_init(&opener, &answerer, &key_a, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&answerer, &hello, &challenge), FL_AGAIN);
    CHECK_EQ(take(&opener, &challenge, &proof), FL_AGAIN);
    proof.bytes[proof.size - 1] ^= 1;
    CHECK_EQ(take(&answerer, &proof, &refused), FL_DENIED);
    CHECK(refused.size > 0);
    /* It does not get a second try. */
    proof.bytes[proof.size - 1] ^= 1;
    CHECK_EQ(take(&answerer, &proof, &refused), FL_PROTOCOL);
}

/* Records of one connection are worth nothing on another. */
static void test_replay(void)
{
    struct fl_handshake opener, answerer, second;
    struct record hello, challenge, other_challenge, proof, out;
    pair_init(&opener, &answerer, &key_a, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&answerer, &hello, &challenge), FL_AGAIN);
    CHECK_EQ(take(&opener, &challenge, &proof), FL_AGAIN);
    fl_handshake_init(&second, FL_PARTY_COORDINATOR, false, &key_a);
    CHECK_EQ(take(&second, &hello, &other_challenge), FL_AGAIN);
    CHECK(memcmp(challenge.bytes, other_challenge.bytes, challenge.size) != 0);
    CHECK_EQ(take(&second, &proof, &out), FL_DENIED);
    /* And a challenge is worth nothing to another opener. */
    fl_handshake_init(&opener, FL_PARTY_NODE, true, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&opener, &challenge, &out), FL_DENIED);
}

/* The answerer's proof sent back to it as the opener's. */
static void test_reflection(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, challenge, proof, out;
    pair_init(&opener, &answerer, &key_a, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&answerer, &hello, &challenge), FL_AGAIN);
    CHECK_EQ(take(&opener, &challenge, &proof), FL_AGAIN);
    memcpy(proof.bytes + proof.size - FL_PROOF_SIZE,
           challenge.bytes + challenge.size - FL_PROOF_SIZE, FL_PROOF_SIZE);
    CHECK_EQ(take(&answerer, &proof, &out), FL_DENIED);
}

/* A node's proof does not make a client of him, nor the other way round. */
static void test_other_party(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, challenge, proof, out;
    pair_init(&opener, &answerer, &key_a, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    hello.bytes[4] = FL_HANDSHAKE_CLIENT_VERSION;
    hello.bytes[7] = FL_PARTY_CLIENT;
    CHECK_EQ(take(&answerer, &hello, &challenge), FL_AGAIN);
    challenge.bytes[4] = FL_PROTOCOL_VERSION;
    CHECK_EQ(take(&opener, &challenge, &proof), FL_DENIED); /* the challenge names a client */
    hello.bytes[4] = FL_PROTOCOL_VERSION;
    hello.bytes[7] = 0;
    fl_handshake_init(&answerer, FL_PARTY_COORDINATOR, false, &key_a);
    CHECK_EQ(take(&answerer, &hello, &out), FL_PROTOCOL);
    hello.bytes[7] = 4;
    fl_handshake_init(&answerer, FL_PARTY_COORDINATOR, false, &key_a);
    CHECK_EQ(take(&answerer, &hello, &out), FL_PROTOCOL);
}

static void test_version(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, refused, none;
    pair_init(&opener, &answerer, NULL, NULL);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(hello.bytes[4], FL_PROTOCOL_VERSION);
    hello.bytes[4] = FL_PROTOCOL_VERSION + 1;
    CHECK_EQ(take(&answerer, &hello, &refused), FL_PROTOCOL);
    CHECK(strcmp(fl_last_error(), "peer speaks firstlight protocol 3, this build speaks 2; "
                                  "run the same version on all machines") == 0);
    CHECK_EQ(take(&opener, &refused, &none), FL_PROTOCOL);
    CHECK(strstr(fl_last_error(), "protocol 2, this build speaks 3") != NULL);
}

/* A client was perhaps written long ago: the cluster's version is not its business. */
static void test_client_version(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, challenge, proof, welcome, none;
    fl_pool_key_make(&key_a);
    fl_handshake_init(&opener, FL_PARTY_CLIENT, true, &key_a);
    fl_handshake_init(&answerer, FL_PARTY_COORDINATOR, false, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(hello.bytes[4], 1);
    CHECK_EQ(take(&answerer, &hello, &challenge), FL_AGAIN);
    CHECK_EQ(challenge.bytes[4], 1);
    CHECK_EQ(take(&opener, &challenge, &proof), FL_AGAIN);
    CHECK_EQ(take(&answerer, &proof, &welcome), FL_OK);
    CHECK_EQ(take(&opener, &welcome, &none), FL_OK);
    hello.bytes[4] = FL_PROTOCOL_VERSION; /* but none that it has not */
    fl_handshake_init(&answerer, FL_PARTY_COORDINATOR, false, &key_a);
    CHECK_EQ(take(&answerer, &hello, &challenge), FL_PROTOCOL);
    CHECK(strstr(fl_last_error(), "peer speaks firstlight protocol 2, this build speaks 1") !=
          NULL);
}

static void test_malformed(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, out;
    pair_init(&opener, &answerer, &key_a, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    for (size_t size = 0; size < hello.size; size++) { /* cut short anywhere */
        fl_handshake_init(&answerer, FL_PARTY_COORDINATOR, false, &key_a);
        CHECK_EQ(fl_handshake_take(&answerer, hello.bytes, size, out.bytes, &out.size),
                 FL_PROTOCOL);
        CHECK(out.size > 0 && out.size <= FL_HANDSHAKE_RECORD_MAX);
    }
    for (size_t i = 0; i < 8; i++) { /* and changed anywhere in its header */
        struct record changed = hello;
        changed.bytes[i] = 0x5a;
        fl_handshake_init(&answerer, FL_PARTY_COORDINATOR, false, &key_a);
        CHECK_EQ(take(&answerer, &changed, &out), FL_PROTOCOL);
    }
    hello.bytes[hello.size - 1] = 2; /* neither with nor without a key */
    fl_handshake_init(&answerer, FL_PARTY_COORDINATOR, false, &key_a);
    CHECK_EQ(take(&answerer, &hello, &out), FL_PROTOCOL);
    static const char http[] = "GET / HTTP/1.1\r\n\r\n";
    CHECK(!fl_handshake_is_record(http, sizeof(http)));
    fl_handshake_init(&answerer, FL_PARTY_COORDINATOR, false, &key_a);
    CHECK_EQ(fl_handshake_take(&answerer, http, sizeof(http), out.bytes, &out.size), FL_PROTOCOL);
}

static void test_out_of_turn(void)
{
    struct fl_handshake opener, answerer, other;
    struct record hello, challenge, proof, welcome, out;
    pair_init(&opener, &answerer, &key_a, &key_a);
    fl_handshake_init(&other, FL_PARTY_NODE, true, &key_a);
    CHECK_EQ(fl_handshake_take(&other, "x", 1, out.bytes, &out.size), FL_PROTOCOL);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&answerer, &hello, &challenge), FL_AGAIN);
    CHECK_EQ(take(&opener, &challenge, &proof), FL_AGAIN);
    CHECK_EQ(take(&answerer, &proof, &welcome), FL_OK);
    CHECK_EQ(take(&answerer, &proof, &out), FL_PROTOCOL); /* again, when all is done */
    CHECK_EQ(take(&opener, &hello, &out), FL_PROTOCOL);   /* a hello for a welcome */
    CHECK_EQ(take(&opener, &welcome, &out), FL_PROTOCOL); /* too late */
    fl_handshake_init(&opener, FL_PARTY_NODE, true, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&opener, &welcome, &out), FL_PROTOCOL); /* without a challenge */
}

/* The reason is foreign text: control characters must not reach a terminal. */
static void test_reason_is_printable(void)
{
    struct fl_handshake opener, answerer;
    struct record hello, refused, none;
    pair_init(&opener, &answerer, NULL, &key_a);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    CHECK_EQ(take(&answerer, &hello, &refused), FL_DENIED);
    memset(refused.bytes + 9, 0x1b, sizeof(refused.bytes) - 9);
    refused.size = sizeof(refused.bytes);
    CHECK_EQ(take(&opener, &refused, &none), FL_DENIED);
    CHECK(strchr(fl_last_error(), 0x1b) == NULL);
    fl_handshake_init(&opener, FL_PARTY_NODE, true, NULL);
    fl_handshake_hello(&opener, hello.bytes, &hello.size);
    refused.size = 8; /* without a reason */
    CHECK_EQ(take(&opener, &refused, &none), FL_PROTOCOL);
}

static const struct test_case cases[] = {
    {"handshake: without keys on either side it completes", test_no_keys},
    {"handshake: with the same key on both sides it completes", test_same_key},
    {"handshake: an answerer with a key refuses an opener without", test_answerer_needs_key},
    {"handshake: an opener with a key is refused by an answerer without", test_opener_needs_key},
    {"handshake: an opener with a key does not settle for no key", test_opener_refuses_keyless},
    {"handshake: two different keys are told to both sides", test_other_key},
    {"handshake: a forged proof is refused, and ends it", test_forged_proof},
    {"handshake: replayed records are refused", test_replay},
    {"handshake: a proof sent back to its maker is refused", test_reflection},
    {"handshake: a proof covers both parties", test_other_party},
    {"handshake: another version is named, on both sides", test_version},
    {"handshake: a client has a version of its own", test_client_version},
    {"handshake: short, long and changed records are refused", test_malformed},
    {"handshake: records out of turn are refused", test_out_of_turn},
    {"handshake: a reason from elsewhere is made printable", test_reason_is_printable},
};

int main(int argc, char **argv)
{
    fl_log_init("", (enum fl_log_level) - 1); /* hundreds of expected sentences */
    return test_main(cases, sizeof(cases) / sizeof(cases[0]), argc, argv);
}
