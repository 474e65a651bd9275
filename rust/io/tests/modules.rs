//! The modules of this crate form layers: no two of them need each other, directly or through others.

#[path = "../../core/tests/layers/mod.rs"]
mod layers;

use layers::{ROOT, check_layers, cycle, graph};

#[test]
fn no_module_needs_itself_through_others() {
    let graph = check_layers();
    assert!(
        graph.len() > 10 && graph["exchange"].contains("exchange::stream"),
        "the sources were not read: {graph:#?}"
    );
}

#[test]
fn a_circle_between_folders_is_found() {
    let source = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let root = source(ROOT, "mod a;\nmod b;\n");
    let sources = [root, source("a::inner", "use crate::b::B;\n"), source("b", "use crate::a::inner::A;\n")];
    assert!(cycle(&graph(&sources)).is_some());
    assert_eq!(cycle(&graph(&sources[..2])), None);
}
