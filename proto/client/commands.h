/* commands.h - what the tool can do: one function a command.
 *
 * Each takes the words behind the command's name and returns the exit status:
 * 0 done, 1 failed, 2 called wrongly, 130 cancelled.  What failed was said.
 *
 * Thread:  the main thread.
 */
#ifndef PROTO_CLIENT_COMMANDS_H
#define PROTO_CLIENT_COMMANDS_H

#ifdef __cplusplus
extern "C" {
#endif

enum { EXIT_CALLED_WRONGLY = 2 };

int command_generate(int argc, char **argv);
int command_chat(int argc, char **argv);
int command_tokenize(int argc, char **argv);
int command_models(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_load(int argc, char **argv);
int command_unload(int argc, char **argv);
int command_status(int argc, char **argv);
int command_timeline(int argc, char **argv);
int command_keygen(int argc, char **argv);

#ifdef __cplusplus
}
#endif
#endif
