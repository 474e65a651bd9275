//! The result does not depend on how the bytes are split: the same generation, the same error at the same offset.
#![no_main]

use libfuzzer_sys::fuzz_target;
use streamfold_core::{Dialect, Error, Generation, Options, Parser};

fn read<'a>(
    parts: impl IntoIterator<Item = &'a [u8]>,
    dialect: Dialect,
    options: Options,
) -> (Generation, Option<Error>) {
    let mut parser = Parser::new(dialect, options);
    let error = parts.into_iter().find_map(|part| parser.feed(part).err()).or_else(|| parser.close(false).err());
    (parser.take(), error)
}

fuzz_target!(|input: &[u8]| {
    let Some((body, &[choice, first, second, step])) = input.split_last_chunk::<4>() else { return };
    let (_, dialect) = Dialect::ALL[usize::from(choice) % Dialect::ALL.len()];
    let options = Options {
        logprobs: choice & 8 == 0,
        max_event_bytes: if choice & 16 == 0 { 1 << 20 } else { 300 },
        token_limit: (choice & 32 != 0).then_some(2),
        ..Options::default()
    };
    let whole = read([body], dialect, options);
    let low = usize::from(first.min(second)).min(body.len());
    let high = usize::from(first.max(second)).min(body.len());
    assert_eq!(whole, read([&body[..low], &body[low..high], &body[high..]], dialect, options));
    assert_eq!(whole, read(body.chunks(usize::from(step).max(1)), dialect, options));
});
