/* Byte stuffing, so that a reset is found wherever it stands in a stream. */
#include "agent.h"

uint8_t *escape(const uint8_t *data, size_t size, size_t *escaped_size) {
    size_t count = 0;
    for (size_t i = 0; i < size; i++) count += data[i] == ESCAPE;
    uint8_t *escaped = allocate(size + count), *to = escaped;
    for (size_t i = 0; i < size; i++) {
        *to++ = data[i];
        if (data[i] == ESCAPE) *to++ = ESCAPED_LITERAL;
    }
    *escaped_size = size + count;
    return escaped;
}

/* Undoes the escapes in place and returns the size of what is left. What stands before a reset is dropped; `reset` tells that one ended here
 * and `nonce` is then the last one's. */
size_t unescape(struct unescaper *state, uint8_t *data, size_t size, bool *reset) {
    size_t to = 0;
    for (size_t i = 0; i < size; i++) {
        uint8_t byte = data[i];
        if (state->left > 0 && byte != ESCAPE) {
            state->nonce[RESET_NONCE - state->left--] = byte;
            if (state->left > 0) continue;
            *reset = true;
            to = 0;
        } else if (state->left > 0) { /* no nonce: perhaps the start of the next reset */
            state->left = 0;
            state->after_escape = true;
        } else if (state->after_escape) {
            state->after_escape = byte == ESCAPE;
            if (byte == ESCAPED_LITERAL) data[to++] = ESCAPE;
            if (byte != ESCAPED_RESET) continue;
            state->left = RESET_NONCE;
            to = 0;
        } else if (byte == ESCAPE) {
            state->after_escape = true;
        } else {
            data[to++] = byte;
        }
    }
    return to;
}
