//! The filter of processes whose memory is mapped from an image's file. It makes calls fail that
//! would show the file instead of zeros.
//!
//! Memory that is a private mapping of a file (`image/mapped`) behaves like anonymous memory, with
//! three exceptions. After a page is given back (`MADV_DONTNEED` and its like, madvise(2)) it
//! should be zero, and here would have the file's contents. The same holds for pages left behind by
//! a moved mapping (`MREMAP_DONTUNMAP`), and for pages added to one (mremap(2)). In the ranges of
//! such memory these calls fail as in the kernel: `EINVAL` for advice, `ENOMEM` for the others. An
//! allocator then keeps the page, or copies to new memory. `MADV_FREE`, which promises no zeros,
//! succeeds and does nothing.
//!
//! Everything else is left to the filter of tenants (`filter`). Not here: the processes that get it
//! (`program`).

use nix::libc;

use crate::sandbox::filter::{
    ARCHITECTURE, IF_ANY_BIT, IF_AT_LEAST, IF_EQUAL, LOAD, NUMBER, OURS, RETURN, argument, jump, op,
};
use crate::sandbox::kernel::FilterInstruction;

const IF_GREATER: u16 = (libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K) as u16;
const IF_GREATER_THAN_X: u16 = (libc::BPF_JMP | libc::BPF_JGT | libc::BPF_X) as u16;
const IF_AT_LEAST_X: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_X) as u16;
const SKIP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const ADD_X: u16 = (libc::BPF_ALU | libc::BPF_ADD | libc::BPF_X) as u16;
const ADD: u16 = (libc::BPF_ALU | libc::BPF_ADD | libc::BPF_K) as u16;
const TO_X: u16 = (libc::BPF_MISC | libc::BPF_TAX) as u16;
const STORE: u16 = libc::BPF_ST as u16;
const RECALL: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_MEM) as u16;

/// Words of the filter's memory: the end of a call's range, in halves.
const END_LOW: u32 = 0;
const END_HIGH: u32 = 1;

/// Advice that gives pages back. From `MADV_DONTNEED_LOCKED` on, advice is newer than most
/// programs, or gives pages back (`MADV_GUARD_INSTALL`).
const ADVICE_DONTNEED: u32 = libc::MADV_DONTNEED.cast_unsigned();
const ADVICE_FREE: u32 = libc::MADV_FREE.cast_unsigned();
const ADVICE_NEWER: u32 = 24;

/// Returns the offset of the upper half of an argument (little endian).
const fn upper(index: u32) -> u32 {
    argument(index) + 4
}

const fn halves(value: u64) -> (u32, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
    ((value >> 32) as u32, value as u32)
}

/// Assembles the filter for these ranges of memory, each from its first byte to the one behind its
/// last.
pub fn of_ranges(ranges: &[(u64, u64)]) -> Vec<FilterInstruction> {
    let mut program = vec![op(LOAD, ARCHITECTURE), jump(IF_EQUAL, OURS, 1, 0), ALLOW];
    program.extend(block(libc::SYS_madvise, &may_give_back(), ranges, 0));
    program.extend(block(libc::SYS_madvise, &gives_back(), ranges, libc::EINVAL));
    program.extend(block(libc::SYS_mremap, &grows_or_leaves(), ranges, libc::ENOMEM));
    program.push(ALLOW);
    program
}

const ALLOW: FilterInstruction = op(RETURN, libc::SECCOMP_RET_ALLOW);

/// Answers a call of this number whose range meets one of these. For it `condition` must jump over
/// the one instruction behind it. Everything else continues behind the block.
fn block(
    number: libc::c_long,
    condition: &[FilterInstruction],
    ranges: &[(u64, u64)],
    errno: libc::c_int,
) -> Vec<FilterInstruction> {
    let answer = op(RETURN, libc::SECCOMP_RET_ERRNO | errno.unsigned_abs());
    let mut check = range_of_call().to_vec();
    ranges.iter().for_each(|range| check.extend(answer_in(*range, answer)));
    let body = [condition, &[over(&check)], &check].concat();
    let number = u32::try_from(number).unwrap_or(u32::MAX);
    [vec![op(LOAD, NUMBER), jump(IF_EQUAL, number, 1, 0), over(&body)], body].concat()
}

fn over(program: &[FilterInstruction]) -> FilterInstruction {
    op(SKIP, u32::try_from(program.len()).unwrap_or(u32::MAX))
}

fn may_give_back() -> [FilterInstruction; 2] {
    [op(LOAD, argument(2)), jump(IF_EQUAL, ADVICE_FREE, 1, 0)]
}

fn gives_back() -> [FilterInstruction; 3] {
    [op(LOAD, argument(2)), jump(IF_AT_LEAST, ADVICE_NEWER, 2, 0), jump(IF_EQUAL, ADVICE_DONTNEED, 1, 0)]
}

/// The new length is the third argument, the old one the second.
fn grows_or_leaves() -> [FilterInstruction; 11] {
    [
        op(LOAD, argument(3)),
        jump(IF_ANY_BIT, libc::MREMAP_DONTUNMAP.cast_unsigned(), 10, 0),
        op(LOAD, upper(1)),
        op(TO_X, 0),
        op(LOAD, upper(2)),
        jump(IF_GREATER_THAN_X, 0, 6, 0),
        jump(IF_AT_LEAST_X, 0, 0, 4),
        op(LOAD, argument(1)),
        op(TO_X, 0),
        op(LOAD, argument(2)),
        jump(IF_GREATER_THAN_X, 0, 1, 0),
    ]
}

/// Stores the end of the call's range: its address, the first argument, plus its length, the
/// second.
fn range_of_call() -> [FilterInstruction; 14] {
    [
        op(LOAD, argument(1)),
        op(TO_X, 0),
        op(LOAD, argument(0)),
        op(ADD_X, 0),
        op(STORE, END_LOW),
        // The sum of the lower halves is smaller than one of them: it has overflowed.
        jump(IF_AT_LEAST_X, 0, 3, 0),
        op(LOAD, upper(0)),
        op(ADD, 1),
        op(SKIP, 1),
        op(LOAD, upper(0)),
        op(TO_X, 0),
        op(LOAD, upper(1)),
        op(ADD_X, 0),
        op(STORE, END_HIGH),
    ]
}

/// Answers if the call's range begins before this one's end and ends behind its start.
fn answer_in((start, end): (u64, u64), answer: FilterInstruction) -> [FilterInstruction; 11] {
    let ((start_high, start_low), (end_high, end_low)) = (halves(start), halves(end));
    [
        op(LOAD, upper(0)),
        jump(IF_GREATER, end_high, 9, 0),
        jump(IF_EQUAL, end_high, 0, 2),
        op(LOAD, argument(0)),
        jump(IF_AT_LEAST, end_low, 6, 0),
        op(RECALL, END_HIGH),
        jump(IF_GREATER, start_high, 3, 0),
        jump(IF_EQUAL, start_high, 0, 3),
        op(RECALL, END_LOW),
        jump(IF_GREATER, start_low, 0, 1),
        answer,
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the kernel does with it (`Documentation/networking/filter.rst`), for a call of this
    /// number.
    fn run(program: &[FilterInstruction], number: libc::c_long, arguments: [u64; 6]) -> u32 {
        let word = |offset: u32| match offset {
            NUMBER => u32::try_from(number).unwrap(),
            ARCHITECTURE => OURS,
            _ => {
                let (high, low) = halves(arguments[(offset as usize - 16) / 8]);
                if offset.is_multiple_of(8) { low } else { high }
            }
        };
        let (mut at, mut a, mut x, mut memory) = (0, 0_u32, 0_u32, [0_u32; 16]);
        loop {
            let FilterInstruction { code, jt, jf, k } = program[at];
            at += 1;
            let holds = match code {
                RETURN => return k,
                IF_EQUAL => a == k,
                IF_AT_LEAST => a >= k,
                IF_GREATER => a > k,
                IF_ANY_BIT => a & k != 0,
                IF_GREATER_THAN_X => a > x,
                IF_AT_LEAST_X => a >= x,
                _ => {
                    match code {
                        LOAD => a = word(k),
                        RECALL => a = memory[k as usize],
                        STORE => memory[k as usize] = a,
                        TO_X => x = a,
                        ADD => a = a.wrapping_add(k),
                        ADD_X => a = a.wrapping_add(x),
                        SKIP => at += k as usize,
                        _ => panic!("{code:#x}"),
                    }
                    continue;
                }
            };
            at += usize::from(if holds { jt } else { jf });
        }
    }

    const HEAP: (u64, u64) = (0x5555_0000_1000, 0x5555_0000_9000);
    /// Over a border of halves.
    const WIDE: (u64, u64) = (0x7fff_ffff_e000, 0x8000_0000_2000);

    const EINVAL: u32 = libc::SECCOMP_RET_ERRNO | 22;
    const ENOMEM: u32 = libc::SECCOMP_RET_ERRNO | 12;
    const ALLOWED: u32 = libc::SECCOMP_RET_ALLOW;

    fn advise(start: u64, len: u64, advice: libc::c_int) -> u32 {
        let advice = u64::from(advice.cast_unsigned());
        run(&of_ranges(&[HEAP, WIDE]), libc::SYS_madvise, [start, len, advice, 0, 0, 0])
    }

    fn remap(start: u64, old: u64, new: u64, flags: libc::c_int) -> u32 {
        let flags = u64::from(flags.cast_unsigned());
        run(&of_ranges(&[HEAP, WIDE]), libc::SYS_mremap, [start, old, new, flags, 0, 0])
    }

    #[test]
    fn pages_are_not_given_back_where_a_file_would_show() {
        const GUARD_INSTALL: libc::c_int = 102;
        const DONTNEED_LOCKED: libc::c_int = 24;
        const SUCCESS: u32 = libc::SECCOMP_RET_ERRNO;
        assert_eq!(advise(HEAP.0 - 4096, 8192, libc::MADV_FREE), SUCCESS, "done without being done");
        assert_eq!(advise(HEAP.1, 4096, libc::MADV_FREE), ALLOWED);
        for advice in [libc::MADV_DONTNEED, DONTNEED_LOCKED, GUARD_INSTALL] {
            assert_eq!(advise(HEAP.0, 4096, advice), EINVAL);
            assert_eq!(advise(HEAP.0 - 4096, 8192, advice), EINVAL, "it ends inside");
            assert_eq!(advise(HEAP.0 - 4096, 4096, advice), ALLOWED, "it ends before");
            assert_eq!(advise(HEAP.1, 4096, advice), ALLOWED, "it begins behind");
            assert_eq!(advise(0x1000, 1 << 47, advice), EINVAL, "it is around both");
        }
        for advice in [libc::MADV_NORMAL, libc::MADV_WILLNEED, libc::MADV_HUGEPAGE, libc::MADV_DONTDUMP] {
            assert_eq!(advise(HEAP.0, 4096, advice), ALLOWED);
        }
    }

    #[test]
    fn mappings_of_a_file_do_not_grow_nor_stay_behind() {
        let moves = libc::MREMAP_MAYMOVE;
        assert_eq!(remap(HEAP.0, 4096, 8192, moves), ENOMEM);
        assert_eq!(remap(HEAP.0, 4096, 4096 + (1 << 32), moves), ENOMEM);
        assert_eq!(remap(HEAP.0, 4096 + (1 << 32), 8192, moves), ALLOWED, "it shrinks");
        assert_eq!(remap(HEAP.0, 8192, 8192, moves), ALLOWED, "it moves");
        assert_eq!(remap(HEAP.0, 8192, 8192, moves | libc::MREMAP_DONTUNMAP), ENOMEM);
        assert_eq!(remap(HEAP.1, 4096, 8192, moves), ALLOWED, "other memory");
    }

    #[test]
    fn other_calls_and_no_ranges_are_as_without() {
        let program = of_ranges(&[HEAP]);
        assert_eq!(run(&program, libc::SYS_munmap, [HEAP.0, 4096, 4, 4, 4, 4]), ALLOWED);
        assert_eq!(run(&of_ranges(&[]), libc::SYS_madvise, [HEAP.0, 4096, 4, 0, 0, 0]), ALLOWED);
    }

    #[test]
    fn as_many_ranges_as_there_can_be_are_a_filter_the_kernel_takes() {
        const INSTRUCTIONS_MAX: usize = 4096;
        let ranges: Vec<_> = (0..64).map(|at| (at << 30, (at << 30) + 4096)).collect();
        let program = of_ranges(&ranges);
        assert!(program.len() <= INSTRUCTIONS_MAX, "{}", program.len());
        let last = run(&program, libc::SYS_mremap, [ranges[63].0, 1, 2, 0, 0, 0]);
        assert_eq!(last, ENOMEM);
    }

    proptest! {
        #[test]
        fn ranges_are_told_apart_in_all_64_bits(
            start in prop_oneof![any::<u64>(), WIDE.0 - 0x3000..WIDE.1 + 0x3000, HEAP.0 - 0x3000..HEAP.1 + 0x3000],
            len in prop_oneof![0..0x10000_u64, any::<u64>()],
            old in any::<u64>(),
            new in any::<u64>(),
        ) {
            let meets = |len: u64| {
                let end = start.wrapping_add(len);
                [HEAP, WIDE].iter().any(|range| start < range.1 && end > range.0)
            };
            let advice = advise(start, len, libc::MADV_DONTNEED);
            prop_assert_eq!(advice, if meets(len) { EINVAL } else { ALLOWED });
            let remapped = remap(start, old, new, libc::MREMAP_MAYMOVE);
            prop_assert_eq!(remapped, if new > old && meets(old) { ENOMEM } else { ALLOWED });
        }
    }
}
