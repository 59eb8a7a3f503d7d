#!/bin/sh
# layers.sh - fails when a file includes what its layer may not see, or a
# third-party header that belongs to another file.  The two tables below are
# the architecture.
set -euf
cd "$(dirname "$0")/../.."

# What each layer may include.  proto/ has three floors: base, proto, client.
may_include() {
    case $1 in
    base)        echo base ;;
    proto)       echo base proto ;;
    client)      echo base proto client ;;
    kernels)     echo base proto kernels ;;
    cluster)     echo base proto cluster ;;
    pipeline)    echo base proto kernels cluster pipeline ;;
    node)        echo base proto kernels cluster pipeline node ;;
    coordinator) echo base proto cluster pipeline coordinator ;;
    tests)       echo base proto client kernels cluster pipeline node coordinator tests ;;
    esac
}

# The files a header belongs to, as LAYER/NAME patterns.
owner_of() {
    case $1 in
    ucp/* | ucs/* | uct/*)   echo 'cluster/ucx_worker.c cluster/ucx_pipe.c' ;;
    mpi.h)                   echo 'cluster/bootstrap_mpi.c' ;;
    nccl.h)                  echo 'cluster/collective_nccl.c' ;;
    cJSON.h | cjson/*)       echo 'cluster/topology.c tests/*.c' ;;
    protobuf-c/* | *.pb-c.h) echo 'proto/*.c' ;;
    liburing*)               echo 'node/shard_reader_uring.c' ;;
    pcre2*)                  echo 'coordinator/pretokenizer.c' ;;
    sodium.h)                echo 'proto/pool_key.c' ;;
    xxhash.h)                echo 'proto/checksum.c' ;;
    simde/*)                 echo 'tests/emulate_avx512.h' ;;
    cuda* | cublas* | cub/* | cooperative_groups* | mma.h)
        echo 'kernels/*.cu kernels/*.cuh node/device_cuda.cu tests/*.cu' ;;

    # The C library, Linux and the compiler; free for all.
    assert.h | ctype.h | errno.h | fenv.h | float.h | inttypes.h | limits.h | locale.h | math.h | \
    setjmp.h | signal.h | std*.h | string*.h | time.h | wchar.h | aio.h | dirent.h | dlfcn.h | \
    endian.h | execinfo.h | fcntl.h | ftw.h | getopt.h | ifaddrs.h | netdb.h | poll.h | pthread.h | \
    sched.h | semaphore.h | spawn.h | syslog.h | termios.h | unistd.h | *intrin.h | cpuid.h | \
    arm_*.h | arpa/* | linux/* | net/* | netinet/* | sys/*)
        echo '*' ;;
    *)  echo 'no file yet: add the header to tests/lint/layers.sh' ;;
    esac
}

layer_of() {
    case $1 in
    proto/base/*)   echo base ;;
    proto/client/*) echo client ;;
    */*)            echo "${1%%/*}" ;;
    *)              echo none ;;
    esac
}

# matches TEXT PATTERN..
matches() {
    text=$1
    shift
    for pattern; do
        # shellcheck disable=SC2254  # the word is meant as a pattern
        case $text in $pattern) return 0 ;; esac
    done
    return 1
}

# One line per include: FILE "HEADER or FILE <HEADER.  Generated code is exempt.
# shellcheck disable=SC2016  # the dollars are awk's
list_includes() {
    for folder in proto kernels cluster pipeline node coordinator tests; do
        [ ! -d "$folder" ] || find "$folder" -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh'
    done | grep -v '\.pb-c\.[ch]$' | sort | xargs awk '/^[ \t]*#[ \t]*include/ {
        match($0, /[<"][^>"]*/)
        print FILENAME, substr($0, RSTART, RLENGTH)
    }'
}

check_include() {
    file=$1 header=${2#?}
    layer=$(layer_of "$file")
    case $2 in
    \"*.h | \"*.cuh)
        # shellcheck disable=SC2046  # words on purpose
        matches "$(layer_of "$header")" $(may_include "$layer") ||
            echo "$file: $layer may not include \"$header\""
        case $header in *.pb-c.h) ;; *) return ;; esac ;;
    \<*) ;;
    *)  echo "$file: \"$header\" is not a header"; return ;;
    esac
    owner=$(owner_of "$header")
    # shellcheck disable=SC2086  # words on purpose
    matches "$layer/${file##*/}" $owner || echo "$file: $header belongs to $owner"
}

broken=$(list_includes | while read -r file header; do check_include "$file" "$header"; done)
[ -z "$broken" ] || { echo "$broken"; exit 1; }
