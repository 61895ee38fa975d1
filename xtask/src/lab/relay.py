"""A slow wire: whatever comes in at one of two interfaces goes out at the other, so many milliseconds later.

The kernel's own way to do this (netem) is missing from many kernels. Frames travel with their offload header
(PACKET_VNET_HDR), so that large segments and unfinished checksums pass as they came.
"""

import collections
import select
import socket
import sys
import time

# linux/if_packet.h, linux/if_ether.h
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, ETH_P_ALL = 263, 15, 23, 3
# One segment as large as offloading makes them, with its headers.
FRAME_MAX = 1 << 17
# What is on its way; a frame more is lost, as on a real wire.
FRAMES_MAX = 20_000
BATCH = 64


def end_of(name):
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.bind((name, ETH_P_ALL))
    end.setblocking(False)
    return end


def take(end, other, queue, delay):
    for _ in range(BATCH):
        try:
            frame = end.recv(FRAME_MAX)
        except BlockingIOError:
            return
        if len(queue) < FRAMES_MAX:
            queue.append((time.monotonic() + delay, other, frame))


def main():
    delay = float(sys.argv[1]) / 1000
    one, two = end_of(sys.argv[2]), end_of(sys.argv[3])
    # The delay is the same for all, so that the first to come is the first to go.
    queue = collections.deque()
    print("ready", flush=True)
    while True:
        left = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        for end in select.select([one, two], [], [], left)[0]:
            take(end, two if end is one else one, queue, delay)
        while queue and queue[0][0] <= time.monotonic():
            _, other, frame = queue.popleft()
            try:
                other.send(frame)
            except OSError:
                pass  # Lost: the interface is down or its queue is full.


main()
