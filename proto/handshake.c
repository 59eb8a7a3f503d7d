#include "proto/handshake.h"

#include <stdio.h>
#include <string.h>

#include "proto/cluster_message.h"

/* Every record: magic[4], version u16, kind u8, party u8.  The version stands where every version
 * finds it.  0x07 is a protobuf tag of wire type 7, which does not exist.
 *
 *   HELLO      nonce[32], has_key u8
 *   CHALLENGE  nonce[32], has_key u8, proof[32]
 *   PROOF      proof[32]
 *   WELCOME    -
 *   REFUSED    status u8, text without NUL (at most REASON_MAX)
 */
static const unsigned char magic[4] = {0x07, 'f', 'l', 'h'};

enum {
    HEADER_SIZE = 8,
    NONCE_SIZE = 32,
    HELLO_SIZE = HEADER_SIZE + NONCE_SIZE + 1,
    CHALLENGE_SIZE = HELLO_SIZE + FL_PROOF_SIZE,
    PROOF_SIZE = HEADER_SIZE + FL_PROOF_SIZE,
    WELCOME_SIZE = HEADER_SIZE,
    REFUSED_SIZE_MIN = HEADER_SIZE + 1,
    REASON_MAX = FL_HANDSHAKE_RECORD_MAX - REFUSED_SIZE_MIN,
};

enum record_kind {
    RECORD_HELLO = 1,
    RECORD_CHALLENGE,
    RECORD_PROOF,
    RECORD_WELCOME,
    RECORD_REFUSED,
};

enum step {
    STEP_SAY_HELLO,
    STEP_WAIT_HELLO,
    STEP_WAIT_CHALLENGE,
    STEP_WAIT_PROOF,
    STEP_WAIT_WELCOME,
    STEP_COMPLETE,
    STEP_FAILED,
};

static const char *party_name(enum fl_party party)
{
    switch (party) {
    case FL_PARTY_CLIENT: return "client";
    case FL_PARTY_NODE: return "node";
    case FL_PARTY_COORDINATOR: return "coordinator";
    }
    return "peer";
}

void fl_handshake_init(struct fl_handshake *handshake, enum fl_party party, bool opener,
                       const struct fl_pool_key *key)
{
    *handshake = (struct fl_handshake){
        .key = key,
        .party = party,
        .opener = opener,
        .step = opener ? STEP_SAY_HELLO : STEP_WAIT_HELLO,
    };
    fl_random_bytes(handshake->nonce, sizeof(handshake->nonce));
}

/* The opener decides which. */
static unsigned version_of(const struct fl_handshake *handshake)
{
    const enum fl_party opener = handshake->opener ? handshake->party : handshake->peer_party;
    return opener == FL_PARTY_CLIENT ? FL_HANDSHAKE_CLIENT_VERSION : FL_PROTOCOL_VERSION;
}

static void put_version(const struct fl_handshake *handshake, unsigned char *out)
{
    const unsigned version = version_of(handshake);
    out[0] = (unsigned char)(version & 0xff);
    out[1] = (unsigned char)(version >> 8);
}

static void put_header(const struct fl_handshake *handshake, enum record_kind kind,
                       unsigned char *out)
{
    memcpy(out, magic, sizeof(magic));
    put_version(handshake, out + 4);
    out[6] = (unsigned char)kind;
    out[7] = (unsigned char)handshake->party;
}

/* What one side proves: both nonces and both parties in the order opener, answerer, and which of
 * the two is speaking, so that no proof serves a second time or the other way. */
enum { STATEMENT_SIZE = 24 + 2 + 3 + 2 * NONCE_SIZE };

static void put_statement(const struct fl_handshake *handshake, bool by_opener,
                          unsigned char out[STATEMENT_SIZE])
{
    static const unsigned char label[24] = "firstlight handshake";
    const bool mine_first = handshake->opener;
    memcpy(out, label, sizeof(label));
    out += sizeof(label);
    put_version(handshake, out);
    out += 2;
    *out++ = by_opener ? 'o' : 'a';
    *out++ = (unsigned char)(mine_first ? handshake->party : handshake->peer_party);
    *out++ = (unsigned char)(mine_first ? handshake->peer_party : handshake->party);
    memcpy(out, mine_first ? handshake->nonce : handshake->peer_nonce, NONCE_SIZE);
    memcpy(out + NONCE_SIZE, mine_first ? handshake->peer_nonce : handshake->nonce, NONCE_SIZE);
}

static void put_proof(const struct fl_handshake *handshake, unsigned char out[FL_PROOF_SIZE])
{
    memset(out, 0, FL_PROOF_SIZE);
    if (handshake->key != NULL) {
        unsigned char statement[STATEMENT_SIZE];
        put_statement(handshake, handshake->opener, statement);
        fl_pool_key_prove(handshake->key, statement, sizeof(statement), out);
    }
}

static bool proof_holds(const struct fl_handshake *handshake, const unsigned char *proof)
{
    if (handshake->key == NULL) {
        return true;
    }
    unsigned char statement[STATEMENT_SIZE];
    put_statement(handshake, !handshake->opener, statement);
    return fl_pool_key_check(handshake->key, statement, sizeof(statement), proof) != 0;
}

void fl_handshake_hello(struct fl_handshake *handshake, unsigned char *out, size_t *out_size)
{
    FL_ASSERT(handshake->step == STEP_SAY_HELLO);
    put_header(handshake, RECORD_HELLO, out);
    memcpy(out + HEADER_SIZE, handshake->nonce, NONCE_SIZE);
    out[HEADER_SIZE + NONCE_SIZE] = handshake->key != NULL;
    *out_size = HELLO_SIZE;
    handshake->step = STEP_WAIT_CHALLENGE;
}

bool fl_handshake_is_record(const void *data, size_t size)
{
    return size >= sizeof(magic) && memcmp(data, magic, sizeof(magic)) == 0;
}

/* The failure's own sentence is for this side; `told` is for the other one. */
static fl_status refuse(struct fl_handshake *handshake, fl_status status, const char *told,
                        unsigned char *out, size_t *out_size)
{
    put_header(handshake, RECORD_REFUSED, out);
    out[HEADER_SIZE] = (unsigned char)status;
    const size_t size = strnlen(told, REASON_MAX);
    memcpy(out + REFUSED_SIZE_MIN, told, size);
    *out_size = REFUSED_SIZE_MIN + size;
    handshake->step = STEP_FAILED;
    return status;
}

/* Foreign text becomes printable ASCII. */
static void copy_reason(const unsigned char *text, size_t size, char out[REASON_MAX + 1])
{
    for (size_t i = 0; i < size; i++) {
        out[i] = text[i] >= ' ' && text[i] < 0x7f ? (char)text[i] : '?';
    }
    out[size] = '\0';
}

static fl_status take_refused(struct fl_handshake *handshake, const unsigned char *record,
                              size_t size)
{
    handshake->step = STEP_FAILED;
    if (size < REFUSED_SIZE_MIN) {
        return FL_FAIL(FL_PROTOCOL, "handshake record of %zu bytes is cut short", size);
    }
    char reason[REASON_MAX + 1];
    copy_reason(record + REFUSED_SIZE_MIN, size - REFUSED_SIZE_MIN, reason);
    const fl_status status = record[HEADER_SIZE] == FL_DENIED ? FL_DENIED : FL_PROTOCOL;
    return FL_FAIL(status, "refused by the %s: %s", party_name((enum fl_party)record[7]), reason);
}

/* A side with a key refuses one without, whichever side that is. */
static fl_status match_keys(struct fl_handshake *handshake, bool peer_has_key, unsigned char *out,
                            size_t *out_size)
{
    const bool has_key = handshake->key != NULL;
    if (has_key == peer_has_key) {
        return FL_OK;
    }
    const char *peer = party_name(handshake->peer_party);
    const char *here = party_name(handshake->party);
    char told[REASON_MAX];
    if (has_key) {
        snprintf(told, sizeof(told),
                 "the %s has a pool key, this %s has none: give it the key file", here, peer);
        return refuse(
            handshake,
            FL_FAIL(FL_DENIED, "the %s has no pool key, this %s requires one", peer, here), told,
            out, out_size);
    }
    snprintf(told, sizeof(told), "the %s has no pool key, this %s has one: give it the key file",
             here, peer);
    return refuse(handshake,
                  FL_FAIL(FL_DENIED,
                          "the %s has a pool key, this %s has none: give it the key file", peer,
                          here),
                  told, out, out_size);
}

static fl_status take_nonce(struct fl_handshake *handshake, const unsigned char *record,
                            unsigned char *out, size_t *out_size)
{
    const unsigned char has_key = record[HEADER_SIZE + NONCE_SIZE];
    if (has_key > 1) {
        return refuse(handshake,
                      FL_FAIL(FL_PROTOCOL, "handshake key flag is %u, 0 or 1 would be right",
                              (unsigned)has_key),
                      "malformed handshake record", out, out_size);
    }
    memcpy(handshake->peer_nonce, record + HEADER_SIZE, NONCE_SIZE);
    return match_keys(handshake, has_key == 1, out, out_size);
}

static fl_status check_proof(struct fl_handshake *handshake, const unsigned char *proof,
                             unsigned char *out, size_t *out_size)
{
    if (proof_holds(handshake, proof)) {
        return FL_OK;
    }
    const char *peer = party_name(handshake->peer_party);
    const char *here = party_name(handshake->party);
    char told[REASON_MAX];
    snprintf(told, sizeof(told), "this %s has another pool key than the %s: copy the same key file",
             peer, here);
    return refuse(handshake,
                  FL_FAIL(FL_DENIED,
                          "the %s has another pool key than this %s: copy the same key file", peer,
                          here),
                  told, out, out_size);
}

static fl_status take_hello(struct fl_handshake *handshake, const unsigned char *record,
                            unsigned char *out, size_t *out_size)
{
    FL_TRY(take_nonce(handshake, record, out, out_size));
    put_header(handshake, RECORD_CHALLENGE, out);
    memcpy(out + HEADER_SIZE, handshake->nonce, NONCE_SIZE);
    out[HEADER_SIZE + NONCE_SIZE] = handshake->key != NULL;
    put_proof(handshake, out + HELLO_SIZE);
    *out_size = CHALLENGE_SIZE;
    handshake->step = STEP_WAIT_PROOF;
    return FL_AGAIN;
}

static fl_status take_challenge(struct fl_handshake *handshake, const unsigned char *record,
                                unsigned char *out, size_t *out_size)
{
    FL_TRY(take_nonce(handshake, record, out, out_size));
    FL_TRY(check_proof(handshake, record + HELLO_SIZE, out, out_size));
    put_header(handshake, RECORD_PROOF, out);
    put_proof(handshake, out + HEADER_SIZE);
    *out_size = PROOF_SIZE;
    handshake->step = STEP_WAIT_WELCOME;
    return FL_AGAIN;
}

static fl_status take_proof(struct fl_handshake *handshake, const unsigned char *record,
                            unsigned char *out, size_t *out_size)
{
    FL_TRY(check_proof(handshake, record + HEADER_SIZE, out, out_size));
    put_header(handshake, RECORD_WELCOME, out);
    *out_size = WELCOME_SIZE;
    handshake->step = STEP_COMPLETE;
    return FL_OK;
}

/* The record that is due, and the size it must have. */
static enum record_kind due(const struct fl_handshake *handshake, size_t *out_size)
{
    switch ((enum step)handshake->step) {
    case STEP_WAIT_HELLO: *out_size = HELLO_SIZE; return RECORD_HELLO;
    case STEP_WAIT_CHALLENGE: *out_size = CHALLENGE_SIZE; return RECORD_CHALLENGE;
    case STEP_WAIT_PROOF: *out_size = PROOF_SIZE; return RECORD_PROOF;
    case STEP_WAIT_WELCOME: *out_size = WELCOME_SIZE; return RECORD_WELCOME;
    case STEP_SAY_HELLO:
    case STEP_COMPLETE:
    case STEP_FAILED: break;
    }
    *out_size = 0;
    return (enum record_kind)0;
}

/* Checks what is common to all records. */
static fl_status check_header(struct fl_handshake *handshake, const unsigned char *record,
                              size_t size, unsigned char *out, size_t *out_size)
{
    if (size < HEADER_SIZE || size > FL_HANDSHAKE_RECORD_MAX ||
        !fl_handshake_is_record(record, size)) {
        return refuse(handshake,
                      FL_FAIL(FL_PROTOCOL,
                              "the peer does not speak firstlight: %zu bytes that are "
                              "no handshake record",
                              size),
                      "a handshake record was expected", out, out_size);
    }
    if (handshake->step == STEP_WAIT_HELLO && record[7] == FL_PARTY_CLIENT) {
        handshake->peer_party = FL_PARTY_CLIENT;
    }
    const unsigned version = (unsigned)record[4] | (unsigned)record[5] << 8;
    const unsigned spoken = version_of(handshake);
    if (version != spoken) {
        char told[REASON_MAX];
        snprintf(told, sizeof(told),
                 "peer speaks firstlight protocol %u, this build speaks %u; "
                 "run the same version on all machines",
                 spoken, version);
        return refuse(handshake,
                      FL_FAIL(FL_PROTOCOL,
                              "peer speaks firstlight protocol %u, this build speaks %u; "
                              "run the same version on all machines",
                              version, spoken),
                      told, out, out_size);
    }
    return FL_OK;
}

fl_status fl_handshake_take(struct fl_handshake *handshake, const void *record, size_t size,
                            unsigned char *out, size_t *out_size)
{
    *out_size = 0;
    if (handshake->step == STEP_COMPLETE || handshake->step == STEP_FAILED ||
        handshake->step == STEP_SAY_HELLO) {
        handshake->step = STEP_FAILED;
        return FL_FAIL(FL_PROTOCOL, "a handshake record of %zu bytes came when none was due", size);
    }
    const unsigned char *bytes = record;
    FL_TRY(check_header(handshake, bytes, size, out, out_size));
    if (bytes[6] == RECORD_REFUSED) {
        return take_refused(handshake, bytes, size);
    }
    size_t size_due = 0;
    const enum record_kind kind = due(handshake, &size_due);
    const unsigned char party = bytes[7];
    const bool party_right = kind == RECORD_HELLO || kind == RECORD_CHALLENGE
                                 ? party >= FL_PARTY_CLIENT && party <= FL_PARTY_COORDINATOR
                                 : party == (unsigned char)handshake->peer_party;
    if (bytes[6] != kind || size != size_due || !party_right) {
        return refuse(handshake,
                      FL_FAIL(FL_PROTOCOL,
                              "handshake record kind %u of %zu bytes from party %u; kind %u of %zu "
                              "bytes was due",
                              (unsigned)bytes[6], size, (unsigned)party, (unsigned)kind, size_due),
                      "malformed handshake record", out, out_size);
    }
    handshake->peer_party = (enum fl_party)party;
    switch (kind) {
    case RECORD_HELLO: return take_hello(handshake, bytes, out, out_size);
    case RECORD_CHALLENGE: return take_challenge(handshake, bytes, out, out_size);
    case RECORD_PROOF: return take_proof(handshake, bytes, out, out_size);
    case RECORD_WELCOME:
    case RECORD_REFUSED: break;
    }
    handshake->step = STEP_COMPLETE;
    return FL_OK;
}
