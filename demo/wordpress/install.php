<?php
// Makes the tables and the first content of the demo's WordPress: php install.php DIRECTORY. The password comes from
// the environment.
define('WP_INSTALLING', true);
// Nobody is to be written to.
function wp_new_blog_notification() {}
function wp_mail() { return true; }

$_SERVER['HTTP_HOST'] = 'wordpress.localhost';
$_SERVER['SERVER_NAME'] = 'wordpress.localhost';
$_SERVER['REQUEST_METHOD'] = 'GET';
$_SERVER['SERVER_PROTOCOL'] = 'HTTP/1.1';
require $argv[1] . '/wp-load.php';
require_once ABSPATH . 'wp-admin/includes/upgrade.php';

wp_install('WordPress on nagaya', 'admin', 'admin@wordpress.example', false, '', getenv('ADMIN_PASSWORD'));
$posts = [
    'A weblog that rests' => 'PHP and this page stand still while nobody reads them. The database goes on: it is another program.',
    'Write something' => 'Log in, write a post, let the site rest and come back: the post is there, and you are still logged in.',
];
foreach ($posts as $title => $text) {
    $id = wp_insert_post(['post_title' => $title, 'post_content' => $text, 'post_status' => 'publish', 'post_author' => 1], true);
    if (is_wp_error($id)) {
        fwrite(STDERR, $id->get_error_message() . "\n");
        exit(1);
    }
}
echo 'installed';
