/* Mailbox: order, wrap-around at every place, a full one, records too large, two threads. */
#include "node/mailbox.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>

#include "node/wake.h"
#include "tests/harness.h"

static void put(struct mailbox *mailbox, uint32_t kind, size_t size)
{
    unsigned char *room = mailbox_reserve(mailbox, kind, size);
    CHECK(room != NULL);
    CHECK_EQ((uintptr_t)room % 8, 0);
    memset(room, (int)(kind & 0xff), size);
    mailbox_post(mailbox);
}

static bool is_filled(const unsigned char *bytes, size_t size, unsigned char with)
{
    for (size_t i = 0; i < size; i++) {
        if (bytes[i] != with) {
            return false;
        }
    }
    return true;
}

static void take(struct mailbox *mailbox, uint32_t kind, size_t size)
{
    uint32_t got_kind;
    size_t got_size;
    const unsigned char *bytes = mailbox_front(mailbox, &got_kind, &got_size);
    CHECK(bytes != NULL);
    CHECK_EQ(got_kind, kind);
    CHECK_EQ(got_size, size);
    CHECK(is_filled(bytes, size, (unsigned char)kind));
    mailbox_pop(mailbox);
}

static void records_come_in_order_wherever_the_ring_wraps(void)
{
    struct mailbox *mailbox;
    CHECK_EQ(mailbox_open(256, &mailbox), FL_OK);
    uint32_t posted = 0;
    uint32_t taken = 0;
    for (int round = 0; round < 2000; round++) {
        /* Sizes that share no factor with the ring, 0 included. */
        put(mailbox, posted, posted * 7 % 61);
        posted++;
        if (round % 3 != 0 || posted - taken > 2) {
            take(mailbox, taken, taken * 7 % 61);
            taken++;
        }
    }
    for (; taken < posted; taken++) {
        take(mailbox, taken, taken * 7 % 61);
    }
    uint32_t kind;
    size_t size;
    CHECK(mailbox_front(mailbox, &kind, &size) == NULL);
    CHECK_EQ(mailbox_used(mailbox), 0);
    mailbox_close(mailbox);
}

static void a_full_mailbox_takes_no_more_until_one_is_popped(void)
{
    struct mailbox *mailbox;
    CHECK_EQ(mailbox_open(256, &mailbox), FL_OK);
    int count = 0;
    while (mailbox_reserve(mailbox, 5, 24) != NULL) {
        put(mailbox, 5, 24);
        CHECK(++count < 100);
    }
    CHECK_EQ(count, 256 / 32);
    take(mailbox, 5, 24);
    put(mailbox, 6, 24);
    CHECK(mailbox_reserve(mailbox, 5, 0) == NULL);
    mailbox_close(mailbox);
}

static void a_record_over_half_the_ring_never_fits_and_half_always_does(void)
{
    struct mailbox *mailbox;
    CHECK_EQ(mailbox_open(1024, &mailbox), FL_OK);
    CHECK(mailbox_reserve(mailbox, 1, 512) == NULL);
    CHECK(mailbox_reserve(mailbox, 1, SIZE_MAX) == NULL);
    for (uint32_t at = 0; at < 300; at++) {
        put(mailbox, 1, at % 40);
        take(mailbox, 1, at % 40);
        put(mailbox, 2, 512 - MAILBOX_OVERHEAD); /* wherever the ring stands */
        take(mailbox, 2, 512 - MAILBOX_OVERHEAD);
    }
    mailbox_close(mailbox);
}

static void a_reservation_that_is_not_posted_is_never_seen(void)
{
    struct mailbox *mailbox;
    CHECK_EQ(mailbox_open(256, &mailbox), FL_OK);
    uint32_t kind;
    size_t size;
    CHECK(mailbox_reserve(mailbox, 9, 50) != NULL);
    CHECK(mailbox_front(mailbox, &kind, &size) == NULL);
    put(mailbox, 3, 10);
    take(mailbox, 3, 10);
    mailbox_close(mailbox);
}

static void an_empty_ring_begins_at_its_front_again(void)
{
    struct mailbox *mailbox;
    CHECK_EQ(mailbox_open(1 << 16, &mailbox), FL_OK);
    const unsigned char *first = mailbox_reserve(mailbox, 1, 100);
    for (uint32_t i = 0; i < 2000; i++) {
        CHECK(mailbox_reserve(mailbox, 1, 100) == first);
        put(mailbox, 1, 100);
        CHECK(mailbox_reserve(mailbox, 2, 40) != first); /* the first is still there */
        put(mailbox, 2, 40);
        take(mailbox, 1, 100);
        take(mailbox, 2, 40);
    }
    mailbox_close(mailbox);
}

enum { RECORDS = 20000 };

struct pair {
    struct mailbox *mailbox;
    struct wake wake;
};

static void *write_records(void *ctx)
{
    struct pair *pair = ctx;
    for (uint32_t i = 0; i < RECORDS;) {
        uint32_t *room = mailbox_reserve(pair->mailbox, i, (i % 13 + 1) * sizeof(*room));
        if (room == NULL) {
            sched_yield();
            continue;
        }
        for (uint32_t w = 0; w <= i % 13; w++) {
            room[w] = i * 31 + w;
        }
        mailbox_post(pair->mailbox);
        wake_signal(&pair->wake);
        i++;
    }
    return NULL;
}

static void fall_asleep(struct wake *wake, bool alone)
{
    struct pollfd fd = {.fd = wake->fd, .events = POLLIN};
    if (alone) {
        wake_wait(wake, WAKE_FOREVER);
    } else if (wake_watch(wake) && poll(&fd, 1, -1) > 0) {
        wake_drain(wake);
    }
}

static uint32_t read_records(struct pair *pair)
{
    uint32_t good = 0;
    for (uint32_t i = 0; i < RECORDS;) {
        uint32_t kind;
        size_t size;
        wake_clear(&pair->wake);
        const uint32_t *words = mailbox_front(pair->mailbox, &kind, &size);
        if (words == NULL) {
            fall_asleep(&pair->wake, i % 2 == 0);
            continue;
        }
        bool same = kind == i && size == (i % 13 + 1) * sizeof(*words);
        for (uint32_t w = 0; same && w <= i % 13; w++) {
            same = words[w] == i * 31 + w;
        }
        good += same;
        mailbox_pop(pair->mailbox);
        i++;
    }
    return good;
}

static void two_threads_lose_nothing_and_no_wake_is_missed(void)
{
    struct pair pair;
    pthread_t writer;
    CHECK_EQ(mailbox_open(512, &pair.mailbox), FL_OK);
    CHECK_EQ(wake_open(&pair.wake), FL_OK);
    CHECK_EQ(pthread_create(&writer, NULL, write_records, &pair), 0);
    const uint32_t good = read_records(&pair);
    pthread_join(writer, NULL);
    wake_close(&pair.wake);
    mailbox_close(pair.mailbox);
    CHECK_EQ(good, RECORDS);
}

static const struct test_case cases[] = {
    {"mailbox: records come in order wherever the ring wraps",
     records_come_in_order_wherever_the_ring_wraps},
    {"mailbox: a full one takes no more until a record is popped",
     a_full_mailbox_takes_no_more_until_one_is_popped},
    {"mailbox: a record over half the ring never fits, one of half always does",
     a_record_over_half_the_ring_never_fits_and_half_always_does},
    {"mailbox: a reservation that is not posted is never seen",
     a_reservation_that_is_not_posted_is_never_seen},
    {"mailbox: an empty ring begins at its front again", an_empty_ring_begins_at_its_front_again},
    {"mailbox: two threads lose nothing and miss no wake",
     two_threads_lose_nothing_and_no_wake_is_missed},
};

TEST_MAIN(cases)
