//! The directory of images on this node, and the files of one image in it.
//!
//! Not here: what is in the files (`format`), images of other nodes (`transfer`).

pub(crate) mod image_store;
pub(crate) mod marks;
pub(crate) mod space;
pub(crate) mod work_dir;
