/*
 * Stands in for pyxis where there is no enroot: registers the options pyxis adds to srun, refuses what pyxis refuses
 * on the command line, and has every task write down what it was given. It starts no container.
 *
 * plugstack.conf:  required /path/spank_pyxis.so DIRECTORY
 * Each task writes DIRECTORY/JOB.STEP.RANK: a line `option=value` per option (`option=` for one without an argument),
 * then a line `argv=word` per word of its command. No path or word of the kit's scripts has a line break in it.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>

SPANK_PLUGIN(pyxis, 1);

static int given(int which, const char *argument, int remote);

/* `val` is the index: one callback serves all. */
#define OPTION(index, name, argument) \
	{ name, argument, "[stand-in for pyxis] recorded", (argument) != NULL, index, given }

static struct spank_option options[] = {
	OPTION(0, "container-image", "[USER@][REGISTRY#]IMAGE[:TAG]|PATH"),
	OPTION(1, "container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]"),
	OPTION(2, "container-workdir", "PATH"),
	OPTION(3, "container-name", "NAME"),
	OPTION(4, "container-save", "PATH"),
	OPTION(5, "container-env", "NAME[,NAME...]"),
	OPTION(6, "container-mount-home", NULL),
	OPTION(7, "no-container-mount-home", NULL),
	OPTION(8, "container-remap-root", NULL),
	OPTION(9, "no-container-remap-root", NULL),
	OPTION(10, "container-entrypoint", NULL),
	OPTION(11, "no-container-entrypoint", NULL),
	OPTION(12, "container-entrypoint-log", NULL),
	OPTION(13, "container-writable", NULL),
	OPTION(14, "container-readonly", NULL),
};
enum { COUNT = sizeof(options) / sizeof(options[0]), IMAGE = 0, MOUNTS = 1, FIRST_SWITCH = 6, LOG = 12 };

static char *values[COUNT];

static int refuse(const char *format, ...)
{
	char text[512];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	slurm_error("pyxis: %s", text);
	return -1;
}

/* A mount needs a source and a destination that are paths; `tmpfs` and `umount` may be sources too. */
static int check_mounts(const char *list)
{
	const char *mount = list;

	while (mount != NULL) {
		const char *next = strchr(mount, ',');
		size_t length = next ? (size_t) (next - mount) : strlen(mount);
		const char *colon = memchr(mount, ':', length);
		int special = !strncmp(mount, "tmpfs:", 6) || !strncmp(mount, "umount:", 7);

		if (length == 0 || (*mount != '/' && *mount != '.' && !special))
			return refuse("--container-mounts: invalid source: %s", mount);
		if (colon && colon[1] != '/' && colon[1] != '.')
			return refuse("--container-mounts: invalid destination: %s", mount);
		mount = next ? next + 1 : NULL;
	}
	return 0;
}

/* Slurm calls it in srun, and again on every node. */
static int given(int which, const char *argument, int remote)
{
	int takes_one = options[which].has_arg;

	if (takes_one && (argument == NULL || *argument == '\0'))
		return refuse("--%s: argument required", options[which].name);
	if (takes_one && which != MOUNTS && values[which] != NULL && strcmp(values[which], argument))
		return refuse("--%s specified multiple times", options[which].name);
	if (which == MOUNTS && check_mounts(argument))
		return -1;
	if (which >= FIRST_SWITCH && which != LOG) {
		/* 6 and 7, 8 and 9, ... but for the log are opposites. */
		int opposite = which > LOG ? (which == 13 ? 14 : 13) : which ^ 1;

		if (values[opposite] != NULL)
			return refuse("both --%s and --%s were specified", options[which].name, options[opposite].name);
	}
	values[which] = strdup(takes_one ? argument : "");
	return values[which] ? 0 : -1;
}

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
	int i;

	if (count != 1 || arguments[0][0] != '/')
		return refuse("one absolute path is needed in plugstack.conf: where to record");
	if (spank_context() != S_CTX_LOCAL && spank_context() != S_CTX_REMOTE && spank_context() != S_CTX_ALLOCATOR)
		return 0;
	for (i = 0; i < COUNT; i++)
		if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
			return refuse("--%s cannot be registered", options[i].name);
	return 0;
}

/* On a node, in the task, as the user. */
int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
	uint32_t job = 0, step = 0, rank = 0;
	char path[4096];
	char **argv = NULL;
	int argc = 0, i;
	FILE *file;

	if (values[IMAGE] == NULL && values[MOUNTS] != NULL)
		slurm_error("pyxis: --container-mounts without --container-image");
	if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_TASK_GLOBAL_ID, &rank) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS)
		return refuse("the task cannot be asked about itself");
	if (step == SLURM_BATCH_SCRIPT)
		snprintf(path, sizeof(path), "%s/%u.batch.%u", arguments[0], job, rank);
	else
		snprintf(path, sizeof(path), "%s/%u.%u.%u", arguments[0], job, step, rank);
	file = fopen(path, "w");
	if (file == NULL)
		return refuse("%s cannot be written", path);
	for (i = 0; i < COUNT; i++)
		if (values[i] != NULL)
			fprintf(file, "%s=%s\n", options[i].name, values[i]);
	for (i = 0; i < argc; i++)
		fprintf(file, "argv=%s\n", argv[i]);
	return fclose(file) ? refuse("%s cannot be written", path) : 0;
}
