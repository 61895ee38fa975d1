/*
 * The first process of a guest that is hostile to its node: it does the one thing that `/mode` names, as root of the
 * guest, and again and again. For `hostile.rs`.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/io.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static uint64_t state = 88172645463325252ULL;

static uint64_t any(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static void load_modules(void)
{
    FILE *order = fopen("/order", "r");
    char name[128], path[256];
    while (order && fscanf(order, "module %127s\n", name) == 1) {
        snprintf(path, sizeof path, "/modules/%s", name);
        int file = open(path, O_RDONLY);
        syscall(SYS_finit_module, file, "", 0);
        close(file);
    }
}

static int port(const char *name)
{
    int found = -1;
    DIR *ports = opendir("/sys/class/virtio-ports");
    for (struct dirent *entry; ports && found < 0 && (entry = readdir(ports));) {
        char path[512], text[64] = "";
        snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", entry->d_name);
        int file = open(path, O_RDONLY);
        if (file < 0 || read(file, text, sizeof text - 1) < 0)
            continue;
        close(file);
        text[strcspn(text, "\n")] = 0;
        snprintf(path, sizeof path, "/dev/%s", entry->d_name);
        if (!strcmp(text, name))
            found = open(path, O_RDWR | O_NONBLOCK);
    }
    if (ports)
        closedir(ports);
    return found;
}

static void say(const char *line)
{
    int agent = port("agent");
    if (write(agent, line, strlen(line)) < 0)
        _exit(1);
    close(agent);
}

/* Writes to every port of the processor, and to the registers of the devices of virtio. */
static void write_devices(void)
{
    iopl(3);
    int memory = open("/dev/mem", O_RDWR | O_SYNC);
    volatile uint32_t *registers = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0xfeb00000);
    for (long turns = 0;; turns++) {
        uint16_t number = (uint16_t)any();
        /* Not the port that ends the machine. */
        if (number != 0x604 && number != 0x64 && number != 0xcf9)
            outl((uint32_t)any(), number);
        if (registers != MAP_FAILED && turns % 16 == 0)
            registers[any() % ((1 << 20) / 4)] = (uint32_t)any();
    }
}

/* Writes to all ports of virtio-console, and reads nothing. */
static void flood_ports(void)
{
    static char bytes[65536];
    int ports[] = {port("agent"), port("log"), port("files")};
    for (;;) {
        for (size_t at = 0; at < sizeof bytes / 8; at++)
            ((uint64_t *)bytes)[at] = any();
        /* Half of what the node takes for a request for files has a right head. */
        uint32_t len = 40 + (uint32_t)(any() % 4096), code = (uint32_t)(any() % 60);
        if (any() & 1) {
            memcpy(bytes, &len, 4);
            memcpy(bytes + 4, &code, 4);
        }
        for (size_t at = 0; at < 3; at++)
            if (write(ports[at], bytes, at == 2 ? len : sizeof bytes) < 0)
                usleep(1000);
    }
}

static void flood_network(void)
{
    struct ifreq request = {.ifr_name = "eth0"};
    struct sockaddr_in *own = (struct sockaddr_in *)&request.ifr_addr, to = {.sin_family = AF_INET};
    int control = socket(AF_INET, SOCK_DGRAM, 0);
    own->sin_family = AF_INET;
    inet_pton(AF_INET, "10.0.2.15", &own->sin_addr);
    ioctl(control, SIOCSIFADDR, &request);
    ioctl(control, SIOCGIFFLAGS, &request);
    request.ifr_flags |= IFF_UP;
    ioctl(control, SIOCSIFFLAGS, &request);
    for (;;) {
        char bytes[1400];
        for (size_t at = 0; at < sizeof bytes; at++)
            bytes[at] = (char)any();
        /* The node's and the name server's address of QEMU's network, and neighbours that are not there. */
        to.sin_addr.s_addr = htonl(0x0a000200 + (uint32_t)(any() % 8));
        to.sin_port = htons((uint16_t)any());
        int kind = any() & 1 ? SOCK_STREAM : SOCK_DGRAM, one = socket(AF_INET, kind | SOCK_NONBLOCK, 0);
        connect(one, (struct sockaddr *)&to, sizeof to);
        if (write(one, bytes, sizeof bytes) < 0)
            usleep(100);
        if (any() % 4)
            close(one);
        /* Frames of no protocol, with wrong lengths. */
        int raw = socket(AF_PACKET, SOCK_RAW, htons(3));
        struct sockaddr link = {.sa_family = AF_PACKET};
        strcpy(link.sa_data, "eth0");
        if (sendto(raw, bytes, any() % sizeof bytes, 0, &link, sizeof link) < 0)
            usleep(100);
        close(raw);
    }
}

static void eat_memory(void)
{
    for (;;) {
        char *block = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block != MAP_FAILED)
            memset(block, 1, 1 << 20);
    }
}

int main(void)
{
    char mode[32] = "";
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    mount("proc", "/proc", "proc", 0, "");
    mount("sysfs", "/sys", "sysfs", 0, "");
    mount("devtmpfs", "/dev", "devtmpfs", 0, "");
    load_modules();
    int agent = -1;
    for (int tries = 0; tries < 500 && (agent = port("agent")) < 0; tries++)
        usleep(20000);
    close(agent);
    int file = open("/mode", O_RDONLY);
    if (read(file, mode, sizeof mode - 1) < 0)
        return 1;
    /* The node's side of the test waits for it. */
    say("failed begun\n");
    if (!strcmp(mode, "devices"))
        write_devices();
    if (!strcmp(mode, "ports"))
        flood_ports();
    if (!strcmp(mode, "network"))
        flood_network();
    if (!strcmp(mode, "memory"))
        eat_memory();
    if (!strcmp(mode, "power"))
        reboot(RB_POWER_OFF);
    if (!strcmp(mode, "halt"))
        reboot(RB_HALT_SYSTEM);
    if (!strcmp(mode, "fault")) {
        file = open("/proc/sysrq-trigger", O_WRONLY);
        if (write(file, "c", 1) < 0)
            return 1;
    }
    return 0;
}
