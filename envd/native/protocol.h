/* What goes over the stream between a server and the agent. The docstring of envd/guest/protocol.py is the specification; this is its twin.
 *
 * Where the specification leaves a choice, this agent's is:
 *   - every piece of a WRITE is an ask of its own and gets its own OK; all pieces of a file carry the same id. A piece that fails
 *     removes the temporary file, and so does a CANCEL of the id.
 *   - CANCEL is answered OK, after the ERROR ECANCELED of what it cancelled, also when there was nothing to cancel. A cancelled SHELL that
 *     runs is killed as at its deadline.
 *   - in a SHELL answer exactly one of the flags is set for a command that did not finish; all commands of the ask that had not finished
 *     when one of them ran out of time are flagged 1.
 *
 * Escaped streams (serial lines, and every stream that a snapshot may cut in the middle of a frame):
 *     0xFF in a frame is sent as 0xFF 0x00, so that 0xFF 0x01 is found wherever it stands. A reset is 0xFF 0x01 and RESET_NONCE bytes, none of them
 *     0xFF, that a new server chooses at random. It is the first thing that server sends. The agent then drops the half frame it has read and all that it has not
 *     yet sent, forgets the asks of the server before (watches and polls end, running commands go on and answer nobody), and sends the
 *     same reset back. The server skips what it reads until then. A lone 0xFF before a reset is dropped. Until the first reset, and after a
 *     fault of the peer, an agent on an escaped stream skips everything but a reset. Processes and the shell live on across resets. */
#ifndef ENVD_PROTOCOL_H
#define ENVD_PROTOCOL_H

#include <stdint.h>

#define PROTOCOL_VERSION 1
#define MAX_FRAME (8u * 1024 * 1024) /* of what follows a frame's size */
#define CHUNK (1024u * 1024)         /* bytes of file or output data in one frame */
#define LIST_BYTES (16u * 1024 * 1024) /* all parts of one LIST together */
#define HEAD_SIZE 9u                 /* u32 size | u32 id | u8 kind */
#define HEAD_COUNTED 5u              /* of which `size` counts id and kind */

#define ESCAPE 0xFF
#define ESCAPED_LITERAL 0x00
#define ESCAPED_RESET 0x01
#define RESET_NONCE 7u

enum ask {
    ASK_INIT = 1,
    ASK_SHELL = 2,
    ASK_START = 3,
    ASK_OUTPUT = 4,
    ASK_WAIT = 5,
    ASK_PROCESSES = 6,
    ASK_STDIN = 7,
    ASK_CLOSE_STDIN = 8,
    ASK_SIGNAL = 9,
    ASK_RESIZE = 10,
    ASK_READ = 20,
    ASK_WRITE = 21,
    ASK_STAT = 22,
    ASK_LIST = 23,
    ASK_MOVE = 24,
    ASK_REMOVE = 25,
    ASK_MKDIR = 26,
    ASK_WATCH = 27,
    ASK_CANCEL = 42,
    ASK_COUNT = 43,
};

enum answer { ANSWER_PART = 100, ANSWER_OK = 101, ANSWER_ERROR = 102 };

enum { SHELL_TIMED_OUT = 1, SHELL_DIED = 2 };
enum { START_PTY = 1, START_STDIN = 2 };
enum { CHANNEL_STDOUT = 1, CHANNEL_STDERR = 2 };
enum { WRITE_LAST = 1, WRITE_PARENTS = 2, WRITE_MUST_CREATE = 4, WRITE_IN_PLACE = 16 };
enum { LIST_VISIBLE = 1, LIST_FILES = 2 };
enum { ENTRY_FILE = 1, ENTRY_DIRECTORY = 2, ENTRY_LINK = 3, ENTRY_OTHER = 4 };
enum { CHANGE_CREATED = 1, CHANGE_CHANGED = 2, CHANGE_REMOVED = 3, CHANGE_MOVED_FROM = 4, CHANGE_MOVED_TO = 5, CHANGE_OVERFLOW = 6 };

#endif
